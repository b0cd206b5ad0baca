from itertools import pairwise

import numpy as np
import torch

from hplm.model.attention import CPU, PackedAttention, RowAttention


def _plain(query, key, value, heads):
    def split(x):
        return x.view(len(x), heads, -1).transpose(0, 1)

    query, key, value = split(query), split(key), split(value)
    weights = torch.softmax(query @ key.transpose(1, 2) / query.shape[-1] ** 0.5, dim=-1)
    return (weights @ value).transpose(0, 1).flatten(1)


def test_packed_texts_attend_within_themselves():
    lengths, heads = [7, 7, 3, 1, 1, 4], 2
    query, key, value = torch.randn(3, sum(lengths), 8, generator=torch.Generator().manual_seed(1))
    parts = [_plain(*three, heads) for three in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)]
    assert torch.allclose(PackedAttention(lengths, heads)(0, query, key, value), torch.cat(parts), atol=1e-6)


def test_gradients_in_16_bits_are_close_to_those_in_32():
    lengths, heads = [5, 2, 2, 1], 2
    given = torch.randn(3, sum(lengths), 8, generator=torch.Generator().manual_seed(4))
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


def test_texts_and_their_padding_share_rows():
    """Two rows of eight tokens: texts of three and four tokens, then one of eight. The first row ends with padding."""
    lengths, rooms, heads = np.array([3, 4, 8]), np.array([3, 5, 8]), 2
    whole = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(3))
    out = RowAttention(lengths, rooms, 8, heads, CPU, torch.float32)(0, *whole)
    assert not out.isnan().any()
    for start, length in zip((0, 3, 8), lengths.tolist(), strict=True):
        part = slice(start, start + length)
        assert torch.allclose(out[part], _plain(*whole[:, part], heads), atol=1e-6)


def test_a_kernel_for_any_length_gets_the_ends_of_the_texts(monkeypatch):
    """Stands in for the CUDA kernel, and computes text by text."""
    lengths, heads = [5, 3, 1], 2
    whole = torch.randn(3, 9, 8, generator=torch.Generator().manual_seed(4)).bfloat16()

    def varlen(query, key, value, ends, ends_of_keys, longest, longest_key):
        assert ends.dtype == torch.int32 and ends is ends_of_keys and longest == longest_key == 5
        parts = [torch.stack([query, key, value])[:, start:stop].flatten(2) for start, stop in pairwise(ends.tolist())]
        return torch.cat([_plain(*part, heads) for part in parts]).unflatten(1, (heads, -1))

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    attention = PackedAttention(lengths, heads)
    attention._ends = torch.tensor([0, 5, 8, 9], dtype=torch.int32)
    assert torch.allclose(attention(0, *whole), PackedAttention(lengths, heads)(0, *whole), atol=0.05)
