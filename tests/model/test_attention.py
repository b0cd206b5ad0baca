"""Attention, compiled and of torch, against loops over texts and heads; and how much of it each token receives."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hplm.compiled import kernel
from hplm.model.attention import MOST_KEYS, PackedAttention
from tests.support.needed import needs_kernel

compiled = kernel()
INSTRUCTIONS = range(1, 1 + max(1, compiled.instructions if compiled else 0))


def test_gradients_in_16_bits_are_close_to_those_in_32():
    lengths, heads = [5, 2, 2, 1], 2
    given = torch.randn(3, sum(lengths), 8)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        three = given.clone().to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, dtype == torch.bfloat16):
            said = PackedAttention(lengths, heads)(0, *three)
        assert said.dtype == dtype
        said.float().square().sum().backward()
        gradients.append(three.grad.float())
    assert gradients[0].abs().max() > 0.5
    assert torch.allclose(*gradients, atol=0.05)


@pytest.mark.parametrize("near", [None, 2])
def test_a_kernel_for_any_length_gets_the_ends_of_the_texts_and_how_far_tokens_see(monkeypatch, near):
    """Stands in for the CUDA kernel, and computes text by text."""
    lengths, heads = [5, 3, 1], 2
    whole = torch.randn(3, 9, 8).bfloat16()

    def varlen(query, key, value, ends, ends_of_keys, longest, longest_key, window_size=(-1, -1)):
        assert window_size == ((-1, -1) if near is None else (near, near))
        assert ends.dtype == torch.int32 and ends is ends_of_keys and longest == longest_key == 5
        parts = [torch.stack([query, key, value])[:, start:stop].flatten(2) for start, stop in pairwise(ends.tolist())]
        said = [PackedAttention([part.shape[1]], heads)(0, *part, near=near) for part in parts]
        return torch.cat(said).unflatten(1, (heads, -1))

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    attention = PackedAttention(lengths, heads)
    attention._ends = torch.tensor([0, 5, 8, 9], dtype=torch.int32)
    expected = PackedAttention(lengths, heads)(0, *whole, near=near)
    assert torch.allclose(attention(0, *whole, near=near), expected, atol=0.05)


def _attended(attention, three, instructions, reads=None, near=None):
    """Computes with a set of instructions of the compiled kernel; with gradients, torch computes."""
    with torch.set_grad_enabled(instructions == 0), patch.object(compiled, "instructions", instructions):
        used = attention.kernel_for(three[0], near)
        assert (used is not None) == (instructions > 0)
        return attention(0, *three, reads, near)


@needs_kernel()
@given(
    lengths=st.lists(st.integers(1, 70) | st.just(200), min_size=1, max_size=8),
    head=st.sampled_from([16, 32, 48, 64, 128]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 1), (4, 2)]),
    near=st.sampled_from([None, 1, 9, 40]),
    size=st.sampled_from([0, 1e-20, 1, 30, 1e6]),
    seed=st.integers(0, 99),
)
def test_the_kernel_attends_as_torch_does(lengths, head, heads, near, size, seed):
    """`heads`: those of queries, and how many of them share one of keys and values."""
    torch.manual_seed(seed)
    heads, group = heads
    whole = torch.randn(sum(lengths), 3 * heads * head)
    whole[:, : heads * head] *= size
    queries, *others = whole.chunk(3, dim=1)
    three, attention = [queries, *(x[:, : heads // group * head] for x in others)], PackedAttention(lengths, heads)
    expected = _attended(attention, [x.double() for x in three], 0, near=near).float()
    # A score has an error in proportion to it. So large ones may change which of two keys is seen.
    off = 1e-6 * (1 + size * head) * three[2].abs().max()
    for instructions in INSTRUCTIONS:
        found = _attended(attention, three, instructions, near=near)
        if size <= 30:
            assert (found - expected).abs().max() <= off
        else:
            assert ((found - expected).abs() < 1e-3).float().mean() > 0.9


@needs_kernel()
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("near", [None, 30])
def test_a_text_is_the_same_bits_whatever_its_neighbours_are(instructions, near):
    lengths = [300, 64, 33, 33, 16, 9, 1]
    three = torch.randn(3, sum(lengths), 128)
    together = _attended(PackedAttention(lengths, 4), three, instructions, near=near)
    parts = three.split(lengths, dim=1)
    alone = [_attended(PackedAttention([part.shape[1]], 4), part, instructions, near=near) for part in parts]
    assert torch.equal(together, torch.cat(alone))


@needs_kernel()
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("near", [None, 30])
def test_tokens_that_are_read_are_the_same_bits_without_the_others(instructions, near):
    lengths, reads = [300, 64, 33, 16, 9], [1, 19, 33, 40]
    three, attention = torch.randn(3, sum(lengths), 128), PackedAttention(lengths, 4)
    whole = _attended(attention, three, instructions, near=near).split(lengths)
    first = _attended(attention, three, instructions, np.array(reads, dtype=np.int32), near).split(lengths)
    for one, other, read in zip(first, whole, reads, strict=False):
        assert torch.equal(one[:read], other[:read])


@needs_kernel()
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", range(3))
def test_what_is_no_number_spoils_what_it_spoils_in_torch_and_no_other_text(instructions, bad, which):
    lengths, heads = [20, 37], 2
    three = torch.randn(3, sum(lengths), heads * 32)
    attention = PackedAttention(lengths, heads)
    before = _attended(attention, three, instructions)
    three[which, 25, 3] = bad
    after, expected = _attended(attention, three, instructions), _attended(attention, three, 0)
    assert torch.equal(after[:20], before[:20])
    assert torch.equal(after.isfinite(), expected.isfinite())
    assert not after[20:].isfinite().all()
    assert torch.allclose(after, expected, atol=1e-5, equal_nan=True)


@needs_kernel()
def test_torch_attends_to_long_texts_and_in_other_types():
    query, most = torch.zeros(4, 64), MOST_KEYS // 64
    with torch.no_grad():
        assert PackedAttention([most], 1).kernel_for(query) is not None
        assert PackedAttention([most + 1], 1).kernel_for(query) is None
        assert PackedAttention([most + 1], 1).kernel_for(query, near=64) is not None
        assert PackedAttention([4], 8).kernel_for(query) is None
        assert PackedAttention([4], 1).kernel_for(query.half()) is None
    assert PackedAttention([4], 1).kernel_for(query) is None  # it has no gradients
