"""The two halves of a backbone: the lower stack on n-gram windows, the upper stack on whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hplm.model.attention import PackedAttention
from hplm.model.config import BackboneConfig
from hplm.model.layer import Adapt, Attend, Layer, Layers, unchanged
from hplm.model.tensors import array_of
from hplm.model.windows import ABSENT


class LowerStack(nn.Module):
    """General and domain knowledge. The tables hold its precomputed output for each window."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.window = config.window
        self.words = nn.Embedding(config.vocabulary, config.hidden)
        self.places = nn.Parameter(torch.zeros(config.window.n, config.hidden))  # position inside the window only
        self.norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.layers = Layers(Layer(config) for _ in range(config.lower_layers))
        self.gate = nn.Parameter(torch.zeros(config.window.n, config.hidden))
        self.gate_bias = nn.Parameter(torch.zeros(config.window.n))

    def forward(self, windows: Tensor, attention: type[PackedAttention] = PackedAttention) -> Tensor:
        """Turns windows x n of id + 1 into windows x vectors x hidden: gated, with zeros for absent tokens.

        The layers compute only tokens that are present. `attention` is the kind of attention inside the windows.
        """
        tokens, lengths = self.packed(windows)
        places = tokens % self.window.n
        x = self.norm(self.words(windows.flatten()[tokens] - 1) + self.places[places])
        attend = attention(lengths, self.heads, x.device)
        for layer in self.layers:
            x = layer(x, attend)
        gate = torch.sigmoid((x * self.gate[places]).sum(-1) + self.gate_bias[places])
        return self.spread(x * gate.unsqueeze(-1), tokens, windows)[:, self.window.stored]

    def packed(self, windows: Tensor) -> tuple[Tensor, list[int]]:
        """Returns the present tokens of all windows, windows of one length together, and the length of each window.

        A token is its index in the flattened windows.
        """
        present = windows != ABSENT
        lengths, order = present.sum(1).sort(descending=True, stable=True)
        n = self.window.n
        tokens = (order[:, None] * n + torch.arange(n, device=windows.device))[present[order]]
        return tokens, array_of(lengths.cpu()).tolist()

    def spread(self, x: Tensor, tokens: Tensor, windows: Tensor) -> Tensor:
        """Returns what was computed for present tokens as windows x n x ..., with zeros for absent ones."""
        return x.new_zeros(windows.numel(), *x.shape[1:]).index_copy(0, tokens, x).view(*windows.shape, *x.shape[1:])


class UpperStack(nn.Module):
    """The part that runs for each request: gathered sums get position, segment and a norm, then pass the shared layers."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.segments = nn.Embedding(config.segments, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.norm_eps if config.entry_eps is None else config.entry_eps)
        self.layers = Layers(Layer(config) for _ in range(config.upper_layers))

    def enter(self, sums: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        return self.norm(sums + self.positions(positions) + self.segments(segments))

    def forward(
        self,
        sums: Tensor,
        positions: Tensor,
        segments: Tensor,
        attend: Attend,
        adapters: Sequence[Adapt] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Takes and returns packed tokens x hidden. `adapters`: one function for each layer. `rows`: the tokens to return."""
        return self.through(self.enter(sums, positions, segments), attend, adapters, rows)

    def through(self, x: Tensor, attend: Attend, adapters: Sequence[Adapt] | None = None, rows: Tensor | None = None) -> Tensor:
        return through(self.layers, x, attend, adapters, rows)


def through(
    layers: Layers, x: Tensor, attend: Attend, adapters: Sequence[Adapt] | None = None, rows: Tensor | None = None
) -> Tensor:
    for i, layer in enumerate(layers):
        adapt = adapters[i] if adapters is not None else unchanged
        x = layer(x, attend, adapt, rows if i == len(layers) - 1 else None)
    return x
