"""`hplm evaluate`: scores a tenant on this machine and as served, beside baselines that are trained on the same data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from builder.cli.options import ColumnNames, check_picture, open_store
from builder.tasks.columns import AS_TRAINED, Columns
from hplm.cli.ask import LOCAL, ConnectionOptions
from hplm.cli.options import (
    AtLeastOne,
    Device,
    Picture,
    StoreFolder,
    Words,
    about,
    device_of,
    refuse_given,
)
from hplm.cli.show import columns
from hplm.errors import InvalidInput
from hplm.registered import RIVALS, chosen, registered

if TYPE_CHECKING:
    import torch

    from builder.evaluation.comparison import Compared
    from builder.evaluation.evaluation import Evaluation
    from builder.store.store import Store
    from builder.tasks.scores import Scores

AGAINST = "baselines to train on the tenant's data, with the same budget, and to score too, between commas: "
AGAINST += f"{', '.join(registered(RIVALS)) or 'none is installed'} (docs/training.md)"


def evaluate(
    *, store: StoreFolder, id: str, test: Path, int8: bool = False, against: Annotated[Words, about(AGAINST)] = (),
    seeds: AtLeastOne = 1, train: Path | None = None, dev: Path | None = None, picture: Picture = None,
    device: Device = "auto", connection: ConnectionOptions = LOCAL, columns: ColumnNames = AS_TRAINED,
) -> dict[str, Any]:  # fmt: skip
    """Score a tenant on labelled data, also as served, and beside baselines.

    With --url, also score the answers of the server at this address. Of a tenant with students, also score fewer of them, and
    its full stack. Of a decoder's tenant, print the perplexity of targets, beside that of the original model, and the ROUGE of
    what it writes behind prompts.

    :param id: name of the tenant
    :param test: test data in the form of the tenant's training data
    :param int8: also score with the shared products in 8 bits, as `hplm export --dtype int8` serves
    :param seeds: for --against: train each baseline so many times, from the tenant's seed on; their mean counts
    :param train: for --against: the training data, if the file was moved
    :param dev: for --against: the dev data, if the file was moved
    """
    import torch

    from builder.evaluation.comparison import baselines, compared
    from builder.evaluation.evaluation import evaluate_served, evaluate_tenant
    from builder.pictures import check_confusion, draw_confusion
    from builder.tasks.examples import hash_of

    if connection.url is None:
        refuse_given("works only with --url: leave it out", connection)
    if not against:
        refuse_given("works only with --against: leave it out", train=train, dev=dev, seeds=seeds > 1)
    opened, on = open_store(store), device_of(device)
    if opened.config.is_decoder:
        reason = "is not for a decoder's tenant, which is scored by perplexity and ROUGE"
        refuse_given(reason, int8=int8, picture=picture)
    if against and opened.known_tenant(id).embedding is not None:
        raise InvalidInput(f"--against trains schemes with a head, and tenant {id!r} makes vectors: leave it out")
    rivals = {name: chosen(RIVALS, name, "--against") for name in against}
    if opened.config.is_decoder:
        return _of_decoder(
            opened, id, test, on, connection, columns, partial(baselines, rivals=rivals, seeds=seeds, train=train, dev=dev)
        )
    check_picture(picture)
    if picture is not None:
        check_confusion(opened.known_tenant(id))
    evaluation = evaluate_tenant(opened, id, test, on, columns=columns)
    examples = evaluation.texts.examples  # a pipe cannot be read again
    if learned := sum(map(opened.seen(evaluation.tenant).all.__contains__, map(hash_of, examples))):
        print(
            f"{learned:,} of the {len(examples):,} texts of {test} occur in the training or dev data of "
            f"tenant {id!r}: new texts may have lower scores",
            file=sys.stderr,
        )
    if picture is not None:
        draw_confusion(evaluation, picture)
    others: dict[str, Compared | None] = dict.fromkeys(["int8", *rivals, *registered(RIVALS), "served"])
    if (students := opened.knowledge(evaluation.tenant).students) is not None:
        fewer = {f"students {size}": size for size in range(len(students.members) - 1, 0, -1)}
        for name, members in {**fewer, "full stack": 0}.items():
            others[name] = compared(evaluation, [evaluate_tenant(opened, id, examples, on, members=members).answers])
    if int8:
        rounded = evaluate_tenant(opened, id, examples, torch.device("cpu"), eight_bits=True)
        others["int8"] = compared(evaluation, [rounded.answers])
    if connection.url is not None:
        with connection.client(opened.config.name) as client:
            others["served"] = compared(evaluation, [evaluate_served(client, evaluation).answers])
        here, served = evaluation.scores.main, others["served"].scores.main
        if abs(served - here) > 0.001:
            print(
                f"the served score {served:.4f} differs from {here:.4f}, which was computed here in 32 bits. A server that "
                "computes in 16 bits (`hplm export --dtype`) answers a few texts differently, but rounding does not explain "
                "more than a point",
                file=sys.stderr,
            )
    others |= _trained(baselines(opened, evaluation, rivals, seeds, on, train, dev))
    print(f"{id} version {evaluation.tenant.version} on {evaluation.scores.rows:,} rows of {test}")
    print(table(evaluation.scores, others))
    known = {"hplm": evaluation.scores, **{name: one and one.scores for name, one in others.items()}}
    return {
        "tenant": id,
        "metric": evaluation.scores.metric,
        **{name: round(own.main, 4) if own is not None else None for name, own in known.items()},
        "scores": {"hplm": evaluation.scores.described()} | {name: one.described() for name, one in others.items() if one},
    }


def _trained(compared: Iterator[tuple[str, Compared]]) -> dict[str, Compared]:
    """Says each baseline when it is trained: the others may take hours."""
    from builder.console import say

    found: dict[str, Compared] = {}
    for name, one in compared:
        say(f"{name}: {one.scores.metric} {one.scores.main:.4f}, {one}")
        found[name] = one
    return found


def _of_decoder(
    store: Store, id: str, test: Path, device: torch.device, connection: ConnectionOptions, columns: Columns,
    trained: Callable[..., Iterator[tuple[str, Compared]]],
) -> dict[str, Any]:  # fmt: skip
    from builder.evaluation.comparison import compared
    from builder.evaluation.perplexity import Predictor
    from builder.evaluation.writing import evaluate_writing, longest_target, write_served
    from builder.tasks.lookup import windows_found
    from builder.tasks.tasks import training_task
    from hplm.model.prompts import Prompts

    tenant = store.known_tenant(id)
    examples = training_task(tenant.task).read(test, columns.after(store.report(tenant)))
    predictor = Predictor(store, tenant, examples, device)
    own, original = predictor.by_tenant(), predictor.by_original()
    share, error = own.over(original)
    print(
        f"{id} version {tenant.version} on {int(own.tokens.sum()):,} tokens of {len(examples):,} targets of {test}: perplexity "
        f"{own.perplexity:.2f}, which is {share:.3f} (error {error:.3f}) times the original model's {original.perplexity:.2f}"
    )
    print(windows_found(found := predictor.texts.window_shares))
    others: dict[str, Compared | None] = {}
    evaluation: Evaluation | None = None
    if any(example.text for example in examples):  # otherwise it is plain text
        evaluation = evaluate_writing(store, tenant, predictor.texts, device)
        if connection.url is not None:
            with connection.client(store.config.name) as client:
                most = longest_target(Prompts.load(store.folder / "tokenizer.json", store.config), examples)
                served = write_served(client, tenant, examples, most)
            others["served"] = compared(evaluation, [served])
            same = sum(own == other for own, other in zip(evaluation.answers, served, strict=True))
            print(f"the server writes the same behind {same:,} of {len(examples):,} prompts")
        others |= _trained(trained(store, evaluation, device=device))
        print(table(evaluation.scores, others))
    known = {"hplm": evaluation and evaluation.scores, **{name: one and one.scores for name, one in others.items()}}
    return {
        "tenant": id,
        "perplexity": round(own.perplexity, 4),
        "original": round(original.perplexity, 4),
        "share": round(share, 4),
        "error": round(error, 4),
        "windows_found": found,
        "scores": {name: one.described() for name, one in known.items() if one is not None},
    }


def table(own: Scores, others: dict[str, Compared | None]) -> str:
    """Returns a line for each scheme, with the main metric first."""
    rows = [("hplm", own, ""), *((name, one.scores, str(one)) for name, one in others.items() if one is not None)]
    names = [own.metric, *(name for name in own.values if name != own.metric)]
    return columns(
        ("", *names, *["DIFFERENCE"] * (len(rows) > 1)),
        [(name, *(f"{scores.values[one]:.4f}" for one in names), *[apart] * (len(rows) > 1)) for name, scores, apart in rows],
    )
