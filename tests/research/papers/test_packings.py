"""Packings keep their limits and those of a policy, and with masks (TCB, Eq. 5 to 8) each text gives what it gives alone.

That they give the reference's answers: `tests/answers/test_reference.py`.
"""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.engine.backbone import Backbone
from hplm.engine.laid import StagingSettings
from hplm.engine.packing import end_to_end
from hplm.engine.staging import EncoderStager
from hplm.model.layer import Layer, Layers
from hplm.model.stacks import through
from hplm.model.tensors import rounded_up
from hplm.scheduling.selection import OUTSIDE, Places
from research.papers import packings as ours
from research.papers.packings import Concat, GroupCost, Naive, Rows, Slotted, Turbo
from testing.toy import CHAT, WORDS
from tests.engine.asker import texts_of

HEADS, WIDTH = CHAT.heads, CHAT.query_width
CPU = torch.device("cpu")
TOLERANCE = 1e-3  # outputs are 15 at most, and rounding moves them by 2e-4; a wrong mask by tenths
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


def test_the_other_texts_keep_their_rows_if_one_cannot_be_staged_and_few_sizes_are_rounded_up(toy):
    backbone, texts = Backbone(toy.folder), []
    for count in (3, 2, 1, 4, 2):
        texts += texts_of(backbone, "acme", [" ".join(WORDS[:count])])
    damaged = texts[1].slot_key
    texts[1].slot_key = replace(damaged, head=replace(damaged.head, checksum=0))
    stager = EncoderStager(backbone, StagingSettings(16, CPU, torch.float32, packing=Concat()))
    batch = stager.stage(texts, lambda text, error: None, Places(np.array([0, 1, 1, 2, 2])))
    first, _, second, third, fourth = texts
    assert batch.texts == [first, second, third, fourth]
    assert len(batch.sheets[0].sums) == 3 * max(first.tokens, second.tokens, third.tokens + fourth.tokens)
    few = EncoderStager(backbone, StagingSettings(16, CPU, torch.float32, few_sizes=True)).stage(texts[2:], pytest.fail)
    assert len(few.sheets[0].sums) == rounded_up(second.tokens + third.tokens + fourth.tokens)


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
