"""Mixed traffic through the whole upper half equals the reference, with every packing, policy, window and dtype."""

import random
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hplm.engine.overlap import OVERLAPS
from hplm.engine.packing import PACKINGS
from hplm.model.windows import Window
from hplm.scheduling.policy import OURS
from testing.reference import Reference
from testing.toy import CONFIG, TENANTS, WORDS, make_toy, random_text
from tests.engine.asker import Asker
from tests.support.answers import Comparison

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(reference):
    return cache(lambda tenant, text: reference.forward(text, tenant).numpy())


@pytest.fixture(scope="module")
def expected_in_eight_bits(toy):
    reference = Reference.open(toy.folder, eight_bits=True)
    return cache(lambda tenant, text: reference.forward(text, tenant).numpy())


@pytest.mark.parametrize(
    "chosen",
    [
        {"dtype": "fp32"},
        {"dtype": "bf16"},
        {"packing": "turbo", "policy": "das", "admission": "false"},
        {"packing": "slotted:rows=3,length=40", "commit_ms": "0.5", "policy": "slotted_das"},
        {"packing": "slotted", "policy": "slotted_das:rows=4"},
        {"packing": "concat", "policy": "das:row_tokens=50"},
        *({"overlap": overlap} for overlap in OVERLAPS if overlap != "pipelined"),
    ],
    ids=lambda chosen: " ".join(chosen.values()),
)
def test_mixed_traffic_equals_the_reference(toy, expected, chosen):
    """More tenants than half the slots, both tasks, two ranks, two head sizes, one to sixty words, one to five texts."""
    asker, rng = Asker(toy.folder, **chosen), random.Random(1)
    asked = []
    for _ in range(120):
        tenant = rng.choice(TENANTS).id
        texts = [random_text(rng) for _ in range(rng.choice([1, 1, 1, 5]))]
        asked.append((tenant, texts, asker.ask(tenant, texts)))
    comparison = Comparison()
    for tenant, texts, number in asked:
        for text, rows in zip(texts, asker.wait(number), strict=True):
            comparison.add(tenant, rows.logits, expected(tenant, text))
    comparison.assert_equal(chosen.get("dtype", "fp32"))
    asker.close()


def test_mixed_traffic_in_eight_bits_equals_the_reference_in_eight_bits(toy, expected, expected_in_eight_bits):
    asker, rng, comparison = Asker(toy.folder, dtype="int8"), random.Random(1), Comparison()
    asked = [(rng.choice(TENANTS).id, random_text(rng)) for _ in range(80)]
    numbers = [asker.ask(tenant, [text]) for tenant, text in asked]
    nearer = 0
    for (tenant, text), number in zip(asked, numbers, strict=True):
        (rows,) = asker.wait(number)
        comparison.add(tenant, rows.logits, expected_in_eight_bits(tenant, text))
        off = [np.abs(rows.logits - answers(tenant, text)).max() for answers in (expected_in_eight_bits, expected)]
        nearer += off[0] < off[1]
    comparison.assert_equal("int8")
    assert nearer > 0.9 * len(asked), "the answers are those of 32 bits"
    asker.close()


@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_packing_with_every_policy_equals_the_reference(toy, expected, packing, policy):
    """Batches are small, so that policies have a choice. Texts are few and short, so that the reference is fast."""
    asker, rng = Asker(toy.folder, packing=packing, policy=policy, batch_tokens="64"), random.Random(f"{packing} {policy}")
    asked = []
    for _ in range(16):
        tenant, text = rng.choice(TENANTS).id, " ".join(WORDS[: rng.choice([1, 3, 9, 30])])
        deadline_ns = rng.choice([0, time.monotonic_ns() + 10**11])
        asked.append((tenant, text, asker.ask(tenant, [text], deadline_ns=deadline_ns)))
    comparison = Comparison()
    for tenant, text, number in asked:
        (rows,) = asker.wait(number)
        comparison.add(tenant, rows.logits, expected(tenant, text))
    comparison.assert_equal("fp32")
    asker.close()


@pytest.mark.parametrize(
    "window, dtype",
    [(Window(3), "int8"), (Window(3), "bf16"), (Window(5), "fp16"), (Window(2), "int8"), (Window(3, causal=True), "fp16")],
    ids=str,
)
def test_any_window_and_any_dtype_equals_the_reference(tmp_path, window, dtype):
    toy = make_toy(tmp_path, replace(CONFIG, window=window), dtype)
    reference, asker, rng = Reference.open(toy.folder), Asker(toy.folder, plot_hot="3"), random.Random(3)
    asked = [(tenant.id, text := random_text(rng), asker.ask(tenant.id, [text])) for tenant in TENANTS for _ in range(4)]
    comparison = Comparison()
    for tenant, text, number in asked:
        comparison.add(tenant, asker.wait(number)[0].logits, reference.forward(text, tenant).numpy())
    comparison.assert_equal("fp32")
    asker.close()
