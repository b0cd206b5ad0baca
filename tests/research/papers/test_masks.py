"""Causal attention and attention to sources (TCB, Eq. 5 to 8): every packing gives what each text gives alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.engine import packed
from hplm.model.layer import Layer, Layers
from hplm.model.stacks import through
from research.papers.packings import Concat, GroupCost, Naive, Slotted, Turbo, beside, causal_attention, cross_attention
from testing.toy import CHAT

CPU = torch.device("cpu")
HEADS, WIDTH = CHAT.heads, CHAT.query_width
TOLERANCE = 1e-3  # outputs are 15 at most, and rounding moves them by 2e-4; a wrong mask by tenths
whole = st.integers

packings = st.one_of(
    st.sampled_from([packed, Naive().lay]),
    st.builds(lambda call: Turbo(GroupCost.measured(lambda count, width: call + count * width)).lay, whole(0, 100)),
    st.builds(lambda *given: Concat(*given).lay, whole(1, 4), whole(1, 60)),
    st.builds(lambda *given: Slotted(*given).lay, whole(1, 4), whole(1, 60), whole(0, 60)),
)


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


@given(lay=packings, texts=st.lists(st.tuples(whole(1, 40), whole(1, 40)), min_size=1, max_size=16))
@settings(deadline=None, max_examples=100)
def test_in_every_packing_a_target_sees_its_own_source_only_and_nothing_that_comes_later(decoder, lay, texts):
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
    for arrangement in lay(of_sources):
        own = beside(arrangement, of_targets)
        assert (own.texts == arrangement.texts).all() and (own.lengths == of_targets[own.texts]).all()
        attends = [causal_attention(one, HEADS, CPU, torch.float32) for one in (own, arrangement)]
        cross = cross_attention(own, arrangement, HEADS, CPU, torch.float32)
        written, source = both(laid(own, targets), laid(arrangement, sources), *attends, cross)
        found, read = found | taken(own, written), read | taken(arrangement, source)
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        expected = both(target, source, alone(True), alone(True), alone(False))
        assert torch.allclose(found[index], expected[0], atol=TOLERANCE)
        assert torch.allclose(read[index], expected[1], atol=TOLERANCE)


def test_a_mask_is_made_only_where_texts_share_a_row():
    lengths = np.array([3, 4, 4, 2])
    (naive,), (concat,), (flat,) = Naive().lay(lengths), Concat(4, 8).lay(lengths), packed(lengths)
    assert naive.attention(HEADS, CPU, torch.float32, causal=True).mask is None
    assert naive.attention(HEADS, CPU, torch.float32).mask is not None  # it hides padding
    assert concat.attention(HEADS, CPU, torch.float32, causal=True).mask is not None
    assert beside(flat, np.array([5, 1, 1, 1])).rows == 8
