import torch

from hplm.model.attention import PackedAttention, WindowAttention


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
    assert torch.allclose(PackedAttention(lengths, heads)(query, key, value), torch.cat(parts), atol=1e-6)


def test_absent_tokens_are_not_attended_to():
    heads = 2
    present = torch.tensor([[True, True, True], [False, True, True], [False, True, False]])
    query, key, value = torch.randn(3, 9, 8, generator=torch.Generator().manual_seed(2))
    out = WindowAttention(present, heads)(query, key, value).view(3, 3, 8)
    for window in range(3):
        real = present[window]
        mine = [x.view(3, 3, 8)[window][real] for x in (query, key, value)]
        assert torch.allclose(out[window][real], _plain(*mine, heads), atol=1e-6)
