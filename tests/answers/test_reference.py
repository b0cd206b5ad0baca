"""Answers equal the reference, whatever is chosen and whatever comes beside them: the matrix.

The engine runs in this process, with pairs of all its choices. Every way in of a real server is in `test_ways.py`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantVersion
from hplm.engine.settings import EncoderSettings
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.windows import Window
from hplm.parameters import parameters_of
from hplm.scheduling.policy import OURS
from hplm.tenants.models import upper_of
from testing.random_store import change_version, random_store, random_students
from testing.reference import ExpectedAnswer, Reference
from testing.toy import CONFIG, DOMAINS, ROTARY, WITH_STUDENTS, WORDS, random_text
from testing.toy import TENANTS as TOY
from tests import tasks
from tests.engine.asker import Asker, stages_of
from tests.support.answers import Comparison
from tests.support.device import DTYPES
from tests.support.message import mentioning
from tests.tasks import expected_confidence, expected_logits, question, same_labels

pytestmark = pytest.mark.slow

EVERY = "bottleneck", ("query", "key", "value", "attention_out", "ffn_in", "ffn_out")
CROWD = [TenantVersion(f"crowd-{i}", 1, "root", 1, "classify", ["a", "b", "c"], 8, *EVERY) for i in range(12)]  # for four slots
TENANTS = {tenant.id: tenant for tenant in [*TOY, *tasks.TENANTS, *CROWD, WITH_STUDENTS]}
WORLDS = {  # the encoder, the window of its tables, and their precision
    "3 fp16": (CONFIG, Window(3), "fp16"),
    "5 bf16": (CONFIG, Window(5), "bf16"),
    "2 int8": (CONFIG, Window(2), "int8"),
    "causal fp16": (CONFIG, Window(3, causal=True), "fp16"),
    "rotary fp16": (ROTARY, Window(3), "fp16"),
}
FACTORS = {
    "policy": [*OURS, "das:row_tokens=50", "slotted_das:rows=4", "length_aware"],
    "packing": ["packed", "naive", "turbo", "slotted:rows=3,length=40", "concat:rows=2,length=80"],
    "flow": ["one stage", "stages"],
    "world": list(WORLDS),
    "dtype": DTYPES,
    "batch_tokens": ["64", "256"],
    "plot_hot": ["0", "3"],
    "admission": ["true", "false"],
}


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns cases, so that each value of each factor is beside each value of every other factor in at least one."""
    rng, cases = random.Random(0), []
    missing = {
        ((one, a), (other, b)): None for one, other in combinations(factors, 2) for a in factors[one] for b in factors[other]
    }
    while missing:
        first = dict(next(iter(missing)))
        drawn = [{name: first.get(name, rng.choice(values)) for name, values in factors.items()} for _ in range(50)]
        best = max(drawn, key=lambda case: sum(pair in missing for pair in combinations(case.items(), 2)))
        cases.append(best)
        for pair in combinations(best.items(), 2):
            missing.pop(pair, None)
    return cases


CASES = pairwise(FACTORS)


@dataclass(frozen=True)
class Asked:
    tenant: TenantVersion
    text: str
    pair: str | None


@dataclass(frozen=True)
class Expected:
    logits: np.ndarray
    reading: ExpectedAnswer
    confidence: float


class World:
    """All tasks, kinds of adapters and heads in one backbone, and the reference's answers to a pool of texts."""

    def __init__(self, folder: Path, config: BackboneConfig, window: Window, stored: str) -> None:
        tenants = [*TENANTS.values()]
        store = random_store(folder / "store", replace(config, window=window), tenants, DOMAINS, spread=0.3, dtype=stored)
        tasks.leave_some_unanswered(store)
        random_students(store, WITH_STUDENTS)
        tasks.calibrate(store)
        export(store, folder / "repository", ServingOptions(dtype="fp32", slots=4))
        self.folder = folder / "repository/toy/1"
        rng, self.pool = random.Random(5), []
        for tenant in tenants:
            for longest in (3, 20, 60)[: 1 if tenant in CROWD else 3]:
                given = question(rng, tenant.task) if tenant in tasks.TENANTS else (random_text(rng, longest), None)
                self.pool.append(Asked(tenant, *given))

    @cached_property
    def references(self) -> dict[bool, Reference]:
        return {eight: Reference.open(self.folder, eight_bits=eight) for eight in (False, True)}

    @cached_property
    def known(self) -> dict[tuple[str, str, str | None, bool], Expected]:
        return {}

    def expected(self, asked: Asked, eight_bits: bool = False) -> Expected:
        key = asked.tenant.id, asked.text, asked.pair, eight_bits
        if key not in self.known:
            reference, given = self.references[eight_bits], (asked.text, asked.tenant.id, asked.pair)
            logits = np.array(expected_logits(reference, asked.tenant, asked.text, asked.pair))
            reading = reference.answer(*given)
            sure = expected_confidence(reference, asked.tenant.id, reading.labels, logits, asked.text, asked.pair)
            self.known[key] = Expected(logits, reading, sure)
        return self.known[key]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return {name: World(tmp_path_factory.mktemp("world"), *given) for name, given in WORLDS.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))
def test_the_engine_answers_as_the_reference_does(worlds, case):
    world, dtype, rng = worlds[case["world"]], case["dtype"], random.Random(str(case))
    flow = {"stages": stages_of(0, 1)} if case["flow"] == "stages" else {}
    chosen = {name: case[name] for name in ("policy", "packing", "dtype", "batch_tokens", "plot_hot", "admission")}
    if case["world"] == "rotary fp16":
        chosen["packing"] = "packed"  # others know no near tokens, and are refused
    asker, sent = Asker(world.folder, **flow, **chosen), []
    for _ in range(40):
        first = rng.choice(world.pool)
        same = [one for one in world.pool if one.tenant == first.tenant]
        several = [first, *rng.choices(same, k=rng.choice([0, 0, 2]))]
        pairs = [one.pair for one in several] if first.pair is not None else None
        deadline_ns, wants = rng.choice([0, time.monotonic_ns() + 10**12]), rng.random() < 0.5
        number = asker.ask(first.tenant.id, [one.text for one in several], pairs, deadline_ns=deadline_ns, confidence=wants)
        sent.append((number, several, wants))
    compare(world, dtype, [(one, rows, wants) for number, several, wants in sent
                           for one, rows in zip(several, asker.wait(number), strict=True)])  # fmt: skip
    asker.close()


def compare(world, dtype, answers):
    """Labels and spans are compared in fp32 alone: otherwise rounding may choose another one.

    There a tenant's few logits may lie close together, so that those of all tenants with as many labels are compared together.
    """
    comparison, nearer = Comparison(), []
    for asked, found, wants in answers:
        expected = world.expected(asked, dtype == "int8")
        if asked.tenant.task in ("span", "regress") and dtype != "fp32":
            continue
        kind = f"{len(asked.tenant.labels)} labels" if asked.tenant.labels and dtype != "fp32" else asked.tenant.id
        comparison.add(kind, found.logits, expected.logits)
        if dtype == "int8":
            nearer.append(
                np.abs(found.logits - expected.logits).max() < np.abs(found.logits - world.expected(asked).logits).max()
            )
        if dtype == "fp32":
            assert same_labels(asked.tenant.task, found.labels, expected.reading.labels), asked
            assert [tuple(span) for span in found.spans.tolist()] == expected.reading.spans, asked
            assert found.confidence == pytest.approx(expected.confidence if wants else -1, abs=1e-3), asked
    comparison.assert_equal(dtype)
    assert sum(nearer) >= 0.9 * len(nearer), "the answers are those of 32 bits"


def test_the_matrix_can_fail(worlds):
    """Another tenant, window or precision gives other answers, and the texts have all kinds of answers."""
    for world in worlds.values():
        for task in ("classify", "tag"):
            answers = [
                world.references[False].forward(" ".join(WORDS[:9]), tenant.id).numpy()
                for tenant in TENANTS.values()
                if tenant.task == task
            ]
            for number, one in enumerate(answers):
                for other in answers[:number]:
                    assert one.shape != other.shape or np.abs(one - other).max() > 0.01
        sure = [world.expected(one).confidence for one in world.pool]
        assert -1 in sure and len({round(own, 3) for own in sure}) > 5
    known = [(one.tenant.id, world.expected(one).reading.labels) for world in worlds.values() for one in world.pool]
    assert len({len(labels) for name, labels in known if name == "many"}) > 1, "the labels do not vary"
    assert {labels == [""] for name, labels in known if name == "perhaps"} == {True, False}
    spans = [(one, world.expected(one).reading.spans[0]) for world in worlds.values() for one in world.pool if one.pair]
    assert any(span[0] > len(one.pair) / 2 for one, span in spans if one.tenant.id == "find"), "all answers come early"
    texts = [asked for asked in worlds["3 fp16"].pool if asked.tenant.id == "acme"]
    of_worlds = [np.stack([world.expected(asked).logits for asked in texts]) for world in worlds.values()]
    assert all(np.abs(one - other).max() > 0.01 for n, one in enumerate(of_worlds) for other in of_worlds[:n])
    assert {name for case in CASES for name in case.values()} == {name for values in FACTORS.values() for name in values}


@pytest.fixture
def asker(worlds):
    asker = Asker(worlds["3 fp16"].folder)
    yield asker
    asker.close()


def test_the_best_labels_have_the_confidence_of_the_first(asker):
    alone, both = (asker.wait(asker.ask("pair", ["a b", "c d e"], top_k=top_k, confidence=True)) for top_k in (0, 2))
    assert [len(answer.labels) for answer in both] == [2, 2]
    assert [one.confidence for one in both] == pytest.approx([one.confidence for one in alone])


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_are_cut_and_have_prefixes_beside_others(worlds, dtype):
    world, comparison = worlds["3 fp16"], Comparison()
    reference, asker, rng, sent = world.references[dtype == "int8"], Asker(world.folder, dtype=dtype), random.Random(3), []
    for _ in range(12):
        asked = rng.choice([{"prefix": "query"}, {"prefix": "passage"}, {}]), rng.choice([{"dimensions": 7}, {}])
        for name, more in zip(("near", "short"), asked, strict=True):
            texts = [random_text(rng, longest) for longest in (2, 40)]
            sent.append((name, texts, more, asker.ask(name, texts, **more)))
        asker.ask("acme", [random_text(rng)])
    for name, texts, more, number in sent:
        for text, found in zip(texts, asker.wait(number), strict=True):
            comparison.add(f"{name} {more}", found.logits, reference.forward(text, name, **more).numpy())
    asker.close()
    comparison.assert_equal(dtype)


def test_what_a_tenant_cannot_embed_is_refused_by_name(asker):
    for tenant, more, named in (
        ("near", {"prefix": "title"}, ["'query'", "'passage'"]),
        ("first", {"prefix": "query"}, ["'query'"]),
        ("near", {"dimensions": 7}, [32, 7]),
        ("short", {"dimensions": 25}, [24, 25]),
        ("acme", {"dimensions": 7}, ["embed", "'acme'", "'classify'"]),
        ("acme", {"prefix": "query"}, ["embed", "'acme'", "'classify'"]),
        ("near", {"top_k": 2}, ["classify", "'near'", "'embed'"]),
        ("near", {"pairs": ["b"]}, ["TEXT_PAIR"]),
    ):
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            asker.ask(tenant, ["a"], **more)
    with pytest.raises(InvalidInput, match=mentioning("empty")):
        asker.ask("near", [" "], prefix="query")
    asker.answers.clear()  # none was taken


def test_a_passage_that_cannot_be_read_is_refused_or_cut(worlds, asker):
    for texts, pairs, named in (
        ([WORDS[0]], None, [1, "TEXT", "TEXT_PAIR"]),
        ([WORDS[0]], ["\u200b"], [1]),
        ([" ".join(WORDS[:40])], [" ".join(WORDS[:150])], [64, "truncate=true"]),
    ):
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            asker.ask("find", texts, pairs)
    asker.answers.clear()  # none was taken
    long = " ".join(WORDS[:40]), " ".join(WORDS[:150])
    (rows,) = asker.wait(asker.ask("find", [long[0]], [long[1]], truncate=True))
    assert rows.labels == worlds["3 fp16"].references[False].answer(long[0], "find", long[1], truncate=True).labels


def test_a_text_of_thousands_of_tokens_is_answered_beside_short_ones(tmp_path):
    """An export has room for it, and lookup takes it. The reference takes seconds for it."""
    config, tenants = replace(ROTARY, positions=5000, near=64), ("beta", "echo")
    store = random_store(tmp_path / "store", config, [TENANTS[name] for name in tenants], spread=0.3)
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32"))
    exported = EncoderSettings.read(parameters_of(tmp_path / "repository" / upper_of("toy") / "config.pbtxt"))
    assert exported.batch_tokens == config.positions
    folder, rng = tmp_path / "repository/toy/1", random.Random(0)
    texts = [random_text(rng), " ".join(rng.choices(WORDS, k=3000)), random_text(rng)]
    reference = Reference.open(folder)
    expected = {name: [reference.forward(text, name).numpy() for text in texts] for name in tenants}
    for dtype in ("fp32", "bf16"):
        asker, comparison = Asker(folder, dtype=dtype, batch_tokens=str(exported.batch_tokens)), Comparison()
        for name, number in [(name, asker.ask(name, texts)) for name in tenants]:
            for logits, rows in zip(expected[name], asker.wait(number), strict=True):
                comparison.add(name, rows.logits, logits)
        asker.close()
        comparison.assert_equal(dtype)


def test_a_value_far_from_0_is_exact_in_16_bits(tmp_path):
    """A 16-bit sum with the bias would round it: values around 2,000 to the next 8."""
    (mark,) = (tenant for tenant in tasks.TENANTS if tenant.id == "mark")
    store = random_store(tmp_path / "store", CONFIG, [mark], DOMAINS, spread=0.3)
    _, head = store.tenant_weights(mark)
    change_version(store, mark, head=(mark.head_layout(store.config), {**head, "bias": head["bias"] + 1990}))
    export(store, tmp_path / "repository", ServingOptions(dtype="bf16"))
    folder, rng = tmp_path / "repository/toy/1", random.Random(0)
    reference, asker = Reference.open(folder), Asker(folder, dtype="bf16")
    texts = [random_text(rng, 20) for _ in range(30)]
    found = [float(rows.logits[0, 0]) for rows in asker.wait(asker.ask("mark", texts))]
    asker.close()
    expected = [float(reference.forward(text, "mark")) for text in texts]
    assert max(abs(own - right) for own, right in zip(found, expected, strict=True)) < 0.05 * (max(expected) - min(expected))
