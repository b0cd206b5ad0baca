"""Every packing gives each text the reference's answer, and with masks (TCB, Eq. 5 to 8) what the text gives alone."""

import random
from copy import copy
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.engine.engine import Engine, computed
from hplm.engine.packing import end_to_end
from hplm.engine.staging import Stager, StagingSettings
from hplm.model.layer import Layer, Layers
from hplm.model.stacks import through
from hplm.model.tensors import rounded_up
from hplm.scheduling.selection import OUTSIDE, Places
from research.papers import packings as ours
from research.papers.packings import Concat, GroupCost, Naive, Rows, Slotted, Turbo
from testing.toy import CHAT, TENANTS, WORDS, random_text
from tests.engine.asker import texts_of
from tests.support.answers import Comparison
from tests.support.device import DEVICE

HEADS, WIDTH = CHAT.heads, CHAT.query_width
CPU = torch.device("cpu")
TOLERANCE = 1e-3  # outputs are 15 at most, and rounding moves them by 2e-4; a wrong mask by tenths
POOL = 4  # texts of each tenant: short, longer, and as long as the backbone takes
whole = st.integers


@st.composite
def costs(draw):
    call, token, score = draw(st.floats(0, 50)), draw(st.floats(0.1, 2)), draw(st.floats(0, 0.1))
    return GroupCost.measured(lambda count, width: call + count * width * (token + score * width))


sizes = {"rows": whole(1, 4), "length": whole(1, 80)}
packings = st.one_of(
    st.none(), st.just(Naive()), st.builds(Turbo, costs()), st.builds(Concat, **sizes),
    st.builds(Slotted, **sizes, slot=whole(0, 80)),
)  # fmt: skip


class Kitchen:
    """Staging and engine without a queue or threads, and the reference's answers to a pool of texts."""

    def __init__(self, reference):
        self.backbone, rng = reference.backbone, random.Random(11)
        self.engine = Engine(self.backbone.upper(), DEVICE, torch.float32)
        texts = [WORDS[0], random_text(rng, 5), random_text(rng), " ".join(rng.choices(WORDS, k=60))]
        every = {(i, j): (TENANTS[i].id, texts[j]) for i, j in product(range(len(TENANTS)), range(POOL))}
        self.texts = {order: texts_of(self.backbone, id, [text], truncate=True)[0] for order, (id, text) in every.items()}
        self.expected = {order: reference.forward(text, id, truncate=True).numpy() for order, (id, text) in every.items()}

    def staged(self, packing, orders, places=None, few_sizes=False):
        """Stages texts, and checks that the engine gives each the reference's answer."""
        stager = Stager(self.backbone, StagingSettings(16, DEVICE, torch.float32, packing=packing, few_sizes=few_sizes))
        batch = stager.stage([self.texts[order] for order in orders], lambda text, error: None, places)
        kept = [order for order in orders if self.texts[order] in batch.texts]
        comparison = Comparison()
        for order, logits in zip(kept, computed(self.engine, batch), strict=True):
            tenant, readable = TENANTS[order[0]], self.texts[order].spans[:, 0] >= 0
            comparison.add(tenant.id, logits[readable, : len(tenant.labels)], self.expected[order][readable])
        comparison.assert_equal("fp32")
        return batch


@pytest.fixture(scope="module")
def kitchen(toy, reference):
    return Kitchen(reference)


places = st.tuples(whole(0, len(TENANTS) - 1), whole(0, POOL - 1), whole(OUTSIDE, 5), whole(OUTSIDE, 9))


@settings(max_examples=50)
@given(packings, st.lists(places, min_size=1, max_size=20), st.sampled_from(["", "rows", "rows and slots"]), st.booleans())
def test_every_packing_gives_the_reference_answers(kitchen, packing, chosen, handed_over, few_sizes):
    orders, (row, slot) = [one[:2] for one in chosen], np.array([one[2:] for one in chosen]).T
    handed = {"": None, "rows": Places(row), "rows and slots": Places(row, slot)}[handed_over]
    batch = kitchen.staged(packing, orders, handed, few_sizes)
    assert len(batch.texts) == len(orders)
    if packing is None and few_sizes:
        assert len(batch.sheets[0].sums) == rounded_up(sum(len(kitchen.texts[order].addresses) for order in orders))


def test_the_other_texts_keep_their_rows_if_one_cannot_be_staged(kitchen):
    damaged = kitchen.texts["damaged"] = copy(kitchen.texts[1, 2])
    damaged.slot_key = replace(damaged.slot_key, head=replace(damaged.slot_key.head, checksum=0))
    orders = [(0, 1), "damaged", (0, 0), (1, 1), (0, 2)]
    batch = kitchen.staged(Concat(), orders, Places(np.array([0, 1, 1, 2, 2])))
    first, second, third, fourth = left = [kitchen.texts[order] for order in orders if order != "damaged"]
    assert batch.texts == left
    assert len(batch.sheets[0].sums) == 3 * max(first.tokens, second.tokens, third.tokens + fourth.tokens)


@given(
    texts=st.lists(st.tuples(whole(1, 8) | whole(1, 64), whole(OUTSIDE, 7)), min_size=1, max_size=60), rows=whole(1, 4),
    length=whole(1, 64), slot=whole(1, 64), handed=st.booleans(),
)  # fmt: skip
def test_rows_and_slots_keep_their_limits_and_those_of_a_policy(texts, rows, length, slot, handed):
    """A text lies in the row or slot that a policy has chosen, unless it is too much for one."""
    lengths, places = np.array(texts).T
    kinds = (Concat(rows, length), length, places // 2), (Slotted(rows, length, slot), min(slot, length), places)
    for packing, box, number in kinds:
        found = set()
        for arrangement in packing.lay(lengths, Places(places // 2, places) if handed else None):
            if isinstance(arrangement, Rows):
                assert arrangement.width <= box and arrangement.rows <= rows * length
                row = arrangement.starts // arrangement.width
                found |= {frozenset(arrangement.texts[row == one].tolist()) for one in set(row)}
            else:
                assert handed or (arrangement.lengths > box).all()
        filled = {frozenset(np.flatnonzero(number == one).tolist()) for one in set(number) - {OUTSIDE}}
        if handed and all(lengths[list(own)].sum() <= box for own in filled):
            assert found == filled


@given(lengths=st.lists(whole(1, 130), min_size=1, max_size=7), cost=costs())
def test_dynamic_programming_finds_the_cheapest_cuts(lengths, cost):
    lengths = np.array(sorted(lengths, reverse=True))

    def total(cuts):
        edges = pairwise([0, *cuts, len(lengths)])
        return sum(float(cost.of(np.array(end - start), lengths[start])) for start, end in edges)

    every = (cuts for count in range(len(lengths)) for cuts in combinations(range(1, len(lengths)), count))
    assert total(ours.cheapest_cuts(lengths, cost).tolist()) == pytest.approx(min(map(total, every)))


@pytest.fixture(scope="module")
def decoder():
    """Two layers with random weights, and matrices for the attention to sources between them."""
    torch.manual_seed(3)
    layers = Layers(Layer(CHAT, number) for number in range(2)).eval().requires_grad_(False)
    for layer in layers:
        layer.qkv.weight.mul_(8)
    return layers, torch.randn(3, CHAT.hidden, WIDTH) / CHAT.hidden**0.5


def plain(query, key, value, causal):
    """Attention of one text with the formula of the papers. Several heads of queries may share one of keys."""
    query, key, value = (x.view(len(x), -1, CHAT.head_size).transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(HEADS // len(x), 0) for x in (key, value))
    scores = query @ key.mT / CHAT.head_size**0.5
    if causal:
        scores += torch.full_like(scores, -torch.inf).triu(1)
    return (scores.softmax(2) @ value).transpose(0, 1).flatten(1)


def laid(arrangement, texts):
    """Returns the texts as they lie in the tensor. Padding is random: it must change nothing."""
    x = torch.randn(arrangement.rows, CHAT.hidden) * 10
    x[torch.from_numpy(arrangement.tokens)] = torch.cat([texts[text] for text in arrangement.texts])
    return x


def taken(arrangement, x):
    """Returns each text of the tensor, by its index."""
    texts = x[torch.from_numpy(arrangement.tokens)].split(arrangement.lengths.tolist())
    return dict(zip(arrangement.texts.tolist(), texts, strict=True))


@settings(max_examples=50)
@given(packing=packings, texts=st.lists(st.tuples(whole(1, 40), whole(1, 40)), min_size=1, max_size=16))
def test_in_every_packing_a_target_sees_its_own_source_only_and_nothing_that_comes_later(decoder, packing, texts):
    """A causal layer over the sources and one over the targets, attention between them, another layer over the targets."""
    (before, behind), (for_query, for_key, for_value) = ([layers] for layers in decoder[0]), decoder[1]
    torch.manual_seed(0)  # for each example
    sources, targets = ([torch.randn(length, CHAT.hidden) for length in lengths] for lengths in zip(*texts, strict=True))
    of_sources, of_targets = np.array(texts).T

    def both(x, source, attend, attend_sources, cross):
        x, source = through(before, x, attend), through(before, source, attend_sources)
        x = x + cross(0, x @ for_query, source @ for_key, source @ for_value) @ for_query.T
        return through(behind, x, attend), source

    def alone(causal):
        return lambda layer, query, key, value: plain(query, key, value, causal)

    found, read = {}, {}
    for arrangement in [end_to_end(of_sources)] if packing is None else packing.lay(of_sources):
        own = ours.beside(arrangement, of_targets)
        assert (own.texts == arrangement.texts).all() and (own.lengths == of_targets[own.texts]).all()
        attends = [ours.causal_attention(one, HEADS, CPU, torch.float32) for one in (own, arrangement)]
        cross = ours.cross_attention(own, arrangement, HEADS, CPU, torch.float32)
        written, source = both(laid(own, targets), laid(arrangement, sources), *attends, cross)
        found, read = found | taken(own, written), read | taken(arrangement, source)
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        expected = both(target, source, alone(True), alone(True), alone(False))
        assert torch.allclose(found[index], expected[0], atol=TOLERANCE)
        assert torch.allclose(read[index], expected[1], atol=TOLERANCE)
