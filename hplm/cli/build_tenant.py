"""`hplm build tenant`: trains an adapter and a head on labelled data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from hplm.cli.options import Device, Json, Seed, StoreFolder, TaskName, Words, about, device_of, open_store, refuse_given
from hplm.cli.tenant_store import make_exits
from hplm.errors import InvalidInput
from hplm.options import BANK_DTYPES

if TYPE_CHECKING:
    from builder.store.store import Store


@Parameter(name="*", group="Training")
@dataclass(frozen=True)
class Training:
    """The options of the training, of the stored adapter and of its head."""

    adapter: str | None = None
    """kind of adapter: bottleneck or lora (default: as in the tenant's version before, or bottleneck)"""
    rank: int | None = None
    """rank of the adapter; 0: only a head (default: as in the version before, or 32)"""
    places: Words | None = None
    """projections that the adapter changes, between commas: query, key, value, attention_out, ffn_in, ffn_out (default: as in
    the version before, or attention_out; lora: query,value; with --upper-rate all)"""
    dtype: Annotated[str | None, Parameter(choices=BANK_DTYPES)] = None
    """precision of the stored adapter and head (default: as in the version before, or fp16)"""
    epochs: int = 4
    """maximum number of epochs"""
    patience: int = 3
    """stop after this many epochs without a better dev score"""
    learning_rate: float = 2e-3
    """learning rate of adapter and head"""
    upper_rate: float = 0.0
    """also train the upper layers, at this learning rate, and store their change as a LoRA of rank --rank. Answers get better,
    and training takes 1.5 times as long. 1e-4 is a good rate; 0: train only adapter and head"""
    batch_texts: int = 8
    """texts in a training step, with 8,192 tokens at most"""
    teacher: str | None = None
    """a model whose soft answers the tenant learns beside the labels: the folder of a checkpoint with the same labels, or
    `dedicated`, which first fine-tunes the original model in full on the same data"""
    grid: bool = False
    """train with half, once and twice the learning rate, each with 8 and with 32 texts a step; keep the best"""


USUAL = Training()
TASK = "what it learns, such as classify or tag: docs/training.md (default: that of the tenant's version before)"


def tenant(
    *, id: str, store: StoreFolder, train: Path | None = None, dev: Path | None = None,
    task: Annotated[TaskName, about(TASK)] = None, domain: str | None = None,
    from_version: int | None = None, fresh: bool = False, exits: Path | None = None, training: Training = USUAL, seed: Seed = 0,
    device: Device = "auto", json: Json = False,
) -> dict:  # fmt: skip
    """Train an adapter and a head on labelled data.

    :param id: name of the tenant
    :param train: training data, JSONL (docs/training.md); a tenant of a decoder takes the backbone as it is
    :param dev: dev data, JSONL (default: a tenth of the training data)
    :param domain: domain of the tenant (default: that of its version before, or root)
    :param from_version: go on training this version of the tenant (default: the newest, if the training data are new)
    :param fresh: start anew, from random weights
    :param exits: then make its exits by these texts, which need no labels; `hplm tenant exits` has more options
    """
    from builder.training.tenant import build_tenant, warnings_of
    from hplm.tasks import check_backbone

    opened = open_store(store)
    if task is not None:
        check_backbone(task, opened.config)
    if fresh and from_version is not None:
        raise InvalidInput("give either --from-version or --fresh: a tenant begins once")
    if opened.config.is_decoder:
        reason = "tenants of a decoder do not learn here yet: leave it out, or import a LoRA that peft trained"
        refuse_given(reason, training, train=train, dev=dev, from_version=from_version, fresh=fresh, exits=exits)
        return _plain_tenant(opened, id, domain)
    if train is None:
        raise InvalidInput("a tenant learns from labelled data: give --train FILE")
    if exits is not None:
        from builder.exits.build import check_task
        from builder.tables.text_files import check_file

        known = opened.tenant(id)
        check_task(id, task or (known.task if known is not None else None))  # and not after the training
        check_file(exits)
    given = {name: value for name, value in vars(training).items() if value is not None and name != "upper_rate"}
    made = build_tenant(
        opened, id, domain, task, train, dev, from_version=0 if fresh else from_version, device=device_of(device),
        body_rate=training.upper_rate, seed=seed, **given,
    )  # fmt: skip
    report = opened.report(made)
    scores = report["dev"]
    for warning in warnings_of(report):
        print(warning)
    metric = scores["metric"]
    before = f"; version {report['from_version']} had {report['at_start']['dev']:.3f}" if "at_start" in report else ""
    print(f"tenant {made.id} version {made.version}: {metric} {scores[metric]:.3f} on {scores['texts']} dev texts{before}")
    print(f"how it was trained: {opened.tenant_folder(made.id, made.version)}/report.html")
    answer = {"tenant": made.id, "version": made.version, "from_version": report["from_version"]}
    answer |= {"task": made.task, "labels": made.labels, "dev": scores}
    return answer | ({"exits": make_exits(opened, made.id, exits, device)} if exits is not None else {})


def _plain_tenant(store: Store, id: str, domain: str | None) -> dict:
    from builder.importing.tenant import plain_tenant

    tenant = plain_tenant(store, id, domain)
    how = f"with its {tenant.adapter}" if tenant.rank else f"as backbone {store.config.name} does"
    print(f"tenant {tenant.id} version {tenant.version}: {tenant.task} on {tenant.domain}, {how}")
    return {"tenant": tenant.id, "version": tenant.version, "task": tenant.task}
