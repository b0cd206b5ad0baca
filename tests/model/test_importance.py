"""Attention received, against a loop over texts and heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hplm.model.attention import CPU, PackedAttention, RowAttention
from hplm.model.importance import Received

HEADS = 2


def drawn(tokens, dtype=torch.float32):
    """Returns queries, keys and values of two layers."""
    return torch.randn(2, 3, tokens, 8, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def plain(layers, start, length):
    """Returns what each token of one text receives."""
    total = torch.zeros(length)
    for query, key, _ in layers.float()[:, :, start : start + length]:
        for head in (slice(0, 4), slice(4, 8)):
            total += torch.softmax(query[:, head] @ key[:, head].T / 2, dim=-1).sum(0)
    return total


def test_packed_texts_receive_attention_from_themselves():
    lengths = [7, 7, 3, 1, 1, 4]
    layers, attend = drawn(23), PackedAttention(lengths, HEADS)
    received = Received(attend, lengths, HEADS)
    for number, layer in enumerate(layers):
        assert torch.equal(received(number, *layer), attend(number, *layer))
    starts = np.cumsum(lengths) - lengths
    expected = torch.cat([plain(layers, start, length) for start, length in zip(starts.tolist(), lengths, strict=True)])
    assert torch.allclose(received.total, expected, atol=1e-5)
    # Each token gives 1 in each head of each layer.
    assert [float(own.sum()) for own in received.total.split(lengths)] == pytest.approx([4 * length for length in lengths])


def test_a_single_text_gives_the_values_of_the_softmax():
    query, key = torch.tensor([[0.0], [2.0]]), torch.log(torch.tensor([[1.0], [3.0]]))
    received = Received(PackedAttention([2], 1), [2], 1)
    received(0, query, key, key)
    # The first query is 0 and shares evenly; the second gives 1 to 9.
    assert received.total.tolist() == pytest.approx([0.5 + 0.1, 0.5 + 0.9])


def test_padding_receives_and_gives_nothing():
    lengths, rooms = [3, 4, 8], [3, 5, 8]
    layers, attend = drawn(16), RowAttention(np.array(lengths), np.array(rooms), 8, HEADS, CPU, torch.float32)
    received = Received(attend, lengths, HEADS, rooms)
    for number, layer in enumerate(layers):
        received(number, *layer)
    parts = [plain(layers, start, length) for start, length in zip((0, 3, 8), lengths, strict=True)]
    expected = torch.cat([parts[0], parts[1], torch.zeros(1), parts[2]])
    assert torch.allclose(received.total, expected, atol=1e-5)


def test_only_watched_texts_are_computed():
    lengths = [4, 4, 5]
    layers = drawn(13)
    received = Received(PackedAttention(lengths, HEADS), lengths, HEADS, watched=[False, True, False])
    for number, layer in enumerate(layers):
        received(number, *layer)
    assert torch.allclose(received.total[4:8], plain(layers, 4, 4), atol=1e-5)
    assert not received.total[:4].any() and not received.total[8:].any()


def test_sixteen_bits_are_summed_in_32():
    layers = drawn(40, torch.bfloat16)
    received = Received(PackedAttention([40], HEADS), [40], HEADS)
    for number, layer in enumerate(layers):
        received(number, *layer)
    assert received.total.dtype == torch.float32
    assert torch.allclose(received.total, plain(layers, 0, 40), rtol=0.03)
