"""Windows of tokens, and the lower stack, which computes them together, each as if it were alone."""

from dataclasses import replace

import pytest
import torch

from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import random_backbone
from hplm.model.windows import Window
from testing.toy import CHAT, CONFIG
from tests.support.message import mentioning


def test_windows_have_one_to_five_tokens():
    for n in (0, 6):
        with pytest.raises(InvalidInput, match=mentioning(n, 5)):
            Window(n)


WINDOWS = [[0, 8, 0], [5, 6, 7], [0, 6, 7], [9, 3, 0], [5, 6, 7], [0, 9, 0], [2, 2, 2]]


def stack(window):
    lower, _ = random_backbone(replace(CONFIG, window=window))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (lower.places, lower.gate, lower.gate_bias):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return lower


def by_hand(lower, window):
    """Returns the gated vectors of one window, n x hidden."""
    vectors = torch.zeros(len(window), lower.words.embedding_dim)
    here = [i for i, token in enumerate(window) if token]
    x = lower.norm(torch.stack([lower.words.weight[window[i] - 1] + lower.places[i] for i in here]))
    for layer in lower.layers:
        x = layer(x, PackedAttention([len(here)], lower.heads))
    for i, vector in zip(here, x, strict=True):
        vectors[i] = vector * torch.sigmoid((vector * lower.gate[i]).sum() + lower.gate_bias[i])
    return vectors


@pytest.mark.parametrize("causal", [False, True])
def test_each_window_is_computed_as_if_it_were_alone(causal):
    lower = stack(Window(3, causal))
    windows = torch.tensor([[*window[:2], window[2] or 4] for window in WINDOWS] if causal else WINDOWS)
    with torch.no_grad():
        expected = torch.stack([by_hand(lower, window) for window in windows.tolist()])[:, lower.window.stored]
        assert torch.allclose(lower(windows), expected, atol=1e-5)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("config", [CONFIG, CHAT], ids=lambda config: config.name)
def test_a_layer_as_a_plain_function_computes_the_same(config):
    layers = random_backbone(config)[1].layers
    for parameter in layers.parameters():
        parameter.data.normal_(0, 0.3)  # norms too, which are ones and zeros in a random backbone
    x, attend, rows = torch.randn(9, config.hidden), PackedAttention([5, 4], config.heads), torch.tensor([2, 7])
    for layer in layers:
        assert torch.equal(layer(x, attend), layer.plain()(x, attend))
        assert torch.equal(layer(x, attend, rows=rows), layer.plain()(x, attend, rows=rows))
