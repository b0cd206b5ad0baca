"""Exits: texts that leave have the reference's answers, keep them whatever happens to the others, and are watched."""

import random
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantVersion
from hplm.calibration import UNKNOWN, Calibration
from hplm.engine.exits import CLOSED, FEWEST, ExitAudit, is_audited, kept_threshold
from hplm.errors import HplmError, Internal, InvalidInput
from hplm.tasks.tasks import TASKS
from hplm.tenants.exits import Exits, Plan
from hplm.tenants.snapshot import Snapshot
from testing.random_store import random_exits, random_store
from testing.reference import Reference
from testing.toy import CONFIG, ROTARY, Toy, random_text
from tests.engine.asker import Asker, stages_of, texts_of
from tests.engine.world import World
from tests.support.answers import Comparison
from tests.support.device import DTYPES
from tests.support.message import mentioning

LAYERS = 3
LABELS = ["x", "y", "z"]
TENANTS = [
    TenantVersion("one", 1, "root", 1, "classify", LABELS, 4),
    TenantVersion("many", 1, "root", 1, "multilabel", LABELS, 8),
    TenantVersion("words", 1, "root", 1, "tag", ["O", "I"], 4, "lora", ("query", "ffn_out")),
    TenantVersion("head", 1, "root", 1, "classify", ["no", "yes"], 0),
    TenantVersion("number", 1, "root", 1, "regress", ["value"], 4),  # this one and the next are without exits
    TenantVersion("echo", 1, "root", 1, "classify", LABELS, 0),
]
CALIBRATION = Calibration(temperature=2.0)


@pytest.fixture(scope="module", params=[CONFIG, ROTARY], ids=["learned", "rotary"])
def small(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exits")
    store = random_store(folder / "store", replace(request.param, upper_layers=LAYERS), TENANTS, spread=0.3)
    for number, tenant in enumerate(TENANTS[:-2]):
        random_exits(store, tenant, number % LAYERS, 0.85 if tenant.id == "one" else 0.6, seed=number)
    export(store, folder / "repository", ServingOptions(dtype="fp32", slots=8, batch_tokens=256))
    toy = Toy(store, folder / "repository")
    path = toy.folder / "tenants.json"
    exported = Snapshot.load(path)
    calibrated = [replace(one, calibration=CALIBRATION if one.task == "classify" else None) for one in exported.tenants]
    Snapshot(0, exported.branches, calibrated, exported.export).save(path)
    return toy


@pytest.fixture(scope="module")
def given():
    """Texts of each tenant, some with a pair."""
    rng = random.Random(3)
    texts = [(random_text(rng, length), random_text(rng, 9) if length == 12 else None) for length in (1, 5, 12, 40) * 5]
    return [(tenant.id, text, None if tenant.task == "tag" else pair) for tenant in TENANTS for text, pair in texts]


@pytest.fixture(scope="module")
def expected(small):
    references = {eight: Reference.open(small.folder, eight_bits=eight) for eight in (False, True)}
    return cache(
        lambda dtype, tenant, text, pair=None: references[dtype == "int8"].forward(text, tenant, pair, truncate=True).numpy()
    )


def served_by(small, asked, **changes):
    """Returns the answers to texts that may leave, each asked for by itself."""
    asker = Asker(small.folder, slots="8", **changes)
    pairs = [None if pair is None else [pair] for *_, pair in asked]
    numbers = [asker.ask(tenant, [text], own, True, rung=1) for (tenant, text, _), own in zip(asked, pairs, strict=True)]
    answers = [asker.wait(number)[0] for number in numbers]
    asker.close()
    return answers


@pytest.mark.parametrize(
    ("cut", "packing", "dtype", "tokens"),
    [
        *(((2,), packing, "fp32", 256) for packing in ("packed", "naive", "concat:rows=2,length=80", "slotted:rows=2,slot=40")),
        *((cut, "packed", dtype, 256) for cut in ((2,), (0, 2), (0, 1, 2)) for dtype in ("fp32", *DTYPES[2:])),
        *(((2,), "packed", dtype, 1024) for dtype in ("fp32", *DTYPES[2:])),  # enough for threads side by side
    ],
    ids=str,
)
def test_texts_leave_with_the_reference_answers(small, given, expected, cut, packing, dtype, tokens):
    stages, comparison = stages_of(*cut) if len(cut) > 1 else (), Comparison()
    order, levels = random.Random(5).sample(given, len(given)), {tenant.id: set() for tenant in TENANTS}
    changes = {"stages": stages, "packing": packing, "dtype": dtype, "batch_tokens": str(tokens)}
    if packing != "packed" and small.store.config.near is not None:
        with pytest.raises(InvalidInput, match=mentioning(repr(packing), 4, "write packed")):
            served_by(small, order, **changes)
        return
    for one, rows in zip(order, served_by(small, order, **changes), strict=True):
        comparison.add(one[0], rows.logits, expected(dtype, *one))
        levels[one[0]].add(rows.level)
    comparison.assert_equal(dtype)
    assert levels.pop("echo") == levels.pop("number") == {1}
    assert set().union(*levels.values()) == {*range(1, LAYERS + 2)} and all(len(own) > 1 for own in levels.values()), levels


@pytest.fixture(scope="module")
def pair_of_texts(small, given):
    """A text of tenant `one` that leaves early, and one that does not."""
    own = [one for one in given if one[0] == "one" and one[2] is None]
    levels = [rows.level for rows in served_by(small, own)]
    return own[levels.index(1)][1], own[levels.index(1 + LAYERS)][1]


@pytest.mark.parametrize("stages", [(), stages_of(0, 2)])
@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), torch.OutOfMemoryError("CUDA out of memory")], ids=repr)
def test_texts_that_leave_are_answered_before_the_others_and_keep_their_answers_after_an_error(
    small, expected, pair_of_texts, error, stages
):
    world, errors = World(small.folder, partial(expected, "fp32"), policy="fcfs", stages=stages), [error]
    passed = []
    leaver, stayer = (world.offer("one", [text]) for text in pair_of_texts)
    both = world.offer("one", list(pair_of_texts))

    def fail():
        passed.append(1)
        if errors and len(passed) == LAYERS:  # behind the last layer, in the last stage
            assert [len(world.answers[number]) for number in (leaver, stayer)] == [1, 0]
            raise errors.pop()

    served = world.service.served
    served.engine.after_layers(fail)
    world.run_all()
    answers = [world.answers[number][0] for number in (leaver, stayer, both)]
    is_failure = not isinstance(error, torch.OutOfMemoryError)  # else the rest is computed in halves
    assert not errors and [isinstance(answer, HplmError) for answer in answers] == [False, is_failure, is_failure]
    world.has_failed.add("kernel")
    world.hurt |= {stayer: {Internal}, both: {Internal}}
    world.finish()
    world.end()


def test_audited_texts_have_the_full_stacks_answer(small, expected):
    asker, rng = Asker(small.folder), random.Random(7)
    texts = [random_text(rng, 1 + number % 40) for number in range(3000)]
    addresses = [one.addresses for one in texts_of(asker.backbone, "one", texts)]  # all tenants have the same tables
    audited = [text for text, own in zip(texts, addresses, strict=True) if is_audited(own)]
    own = [(tenant.id, text) for tenant in TENANTS for text in audited]
    for (tenant, text), number in zip(own, [asker.ask(tenant, [text], rung=1) for tenant, text in own], strict=True):
        (rows,) = asker.wait(number)
        np.testing.assert_allclose(rows.logits, expected("fp32", tenant, text), atol=1e-3)
        assert rows.level == (1 + LAYERS if tenant not in ("number", "echo") else 1)
    asker.close()
    served = asker.service.served
    assert {tenant for tenant, _ in served.engine.exit_audit.agreements()} == {tenant.id for tenant in TENANTS[:-2]}


def test_a_threshold_rises_then_the_exit_closes_then_it_opens_again(caplog):
    seen = [(0.9, True)] * 100 + [(0.7, False)] * 20
    assert kept_threshold(seen[: FEWEST - 1], 0.6, 0.99) == 0.6
    assert kept_threshold(seen, 0.6, 0.99) == 0.9
    assert kept_threshold([(0.9, False)] * 100, 0.6, 0.9) == CLOSED
    plan = Plan(0, 0.6, 0.5, 0.99, 0.5)
    exits = Exits(None, (Calibration(),), (plan,))
    tenant = SimpleNamespace(id="a", uid=1, version=1, task_object=TASKS["classify"], labels=("x", "y"))
    zeros = np.zeros((1, 3), dtype=np.int32)
    request = SimpleNamespace(tenant=tenant, rung=0)
    text = SimpleNamespace(
        request=request, plan=plan, exits=exits, is_one_row=True, spans=zeros, guess=None, addresses=zeros[0]
    )
    assert not is_audited(text.addresses)
    audit, logits = ExitAudit(), [np.array([[1.5, 0.0]], dtype=np.float32)]  # 0.82

    def leaves():
        return audit.leaving([text], logits, 0).tolist() == [True]

    states = [leaves()]
    for confidence, agrees, count in ((0.95, True, 100), (0.7, False, 100), (0.95, False, 400), (0.7, True, 400)):
        for _ in range(count):
            audit.saw(text, confidence, agrees)
        states.append((leaves(), len(audit)))
    assert states == [True, (True, 0), (False, 1), (False, 1), (True, 0)]
    for _ in range(400):
        audit.saw(text, 0.95, False)
    raised = []
    for version in (1, 2):  # a new one is published
        audit.keep([SimpleNamespace(uid=1, version=version)])
        raised.append((len(audit), len(audit.agreements())))
    assert raised == [(1, 1), (0, 0)]
    said = [record.getMessage() for record in caplog.records]
    assert [any(word in one for one in said) for word in ("a higher threshold", "is closed", "as planned again")] == [True] * 3


def test_level_and_confidence_say_where_a_text_has_left(small, pair_of_texts):
    asker = Asker(small.folder)
    leaver, stayer = ([asker.ask("one", [text], confidence=True, rung=rung) for rung in (1, 2)] for text in pair_of_texts)
    (first,), (cheap_first,) = map(asker.wait, leaver)
    (last,), (cheap_last,) = map(asker.wait, stayer)
    assert (first.level, cheap_first.level, last.level) == (1, 1, 1 + LAYERS) and cheap_last.level < last.level
    assert first.confidence >= 0.85 and 0.425 <= cheap_last.confidence < 0.85
    assert last.confidence == pytest.approx(TASKS["classify"].confidence(CALIBRATION, last.logits, last.spans, LABELS))
    (unasked,) = asker.wait(asker.ask("one", [pair_of_texts[0]], rung=1))
    assert unasked.confidence == UNKNOWN and unasked.level == 1
    asker.close()
