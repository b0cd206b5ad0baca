"""The two halves of a backbone: the lower stack on n-gram windows, the upper stack on whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from hplm.model.attention import PackedAttention, SinkAttention
from hplm.model.config import BackboneConfig
from hplm.model.layer import Adapt, Attend, Layer, Layers, Plain, Rotation, norm_of, unchanged
from hplm.model.tensors import array_of
from hplm.model.windows import ABSENT


class LowerStack(nn.Module):
    """General and domain knowledge. The tables hold its precomputed output for each window."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = config.heads
        self.window = config.window
        self.words = nn.Embedding(config.vocabulary, config.hidden)
        if config.has_places:  # position inside the window only; a decoder's windows begin with the start id
            self.places = nn.Parameter(torch.zeros(config.window.n + config.is_decoder, config.hidden))
        if not config.is_decoder and config.normed_words:
            self.norm = norm_of(config)
        self.layers = Layers(Layer(config, number) for number in range(config.lower_layers))
        if not config.is_decoder:
            self.gate = nn.Parameter(torch.zeros(config.window.n, config.hidden))
            self.gate_bias = nn.Parameter(torch.zeros(config.window.n))

    def forward(self, windows: Tensor) -> Tensor:
        """Turns windows x n of id + 1 into windows x vectors x hidden: gated, with zeros for absent tokens.

        The layers compute only tokens that are present.
        """
        if self.config.is_decoder:
            return self._last_tokens(windows)
        tokens, lengths = self.packed(windows)
        places = tokens % self.window.n
        x = self.words(windows.flatten()[tokens] - 1)
        if self.config.has_places:
            x = x + embedding(places, self.places)
        if self.config.normed_words:
            x = self.norm(x)
        # Thousands of windows of few tokens take less time in torch's calls, one for each length, than in the compiled kernel.
        attend = PackedAttention(lengths, self.heads, x.device, compiled=False)
        x = through(self.layers, x, attend, turn=turn_of(self.config, places, x.dtype))
        gate = torch.sigmoid((x * embedding(places, self.gate)).sum(-1) + embedding(places, self.gate_bias[:, None])[:, 0])
        return self.spread(x * gate.unsqueeze(-1), tokens, windows)[:, self.window.stored]

    def _last_tokens(self, windows: Tensor) -> Tensor:
        """Returns what a decoder computes for the last token of each window, read as a text behind the start id.

        The start id sees nothing but itself, so that it is computed once for all windows. A window that begins with it is not
        given another one. Learned positions are taken out again: the upper stack adds those of the text.
        """
        config = self.config
        assert config.start_id is not None
        windows = _without(config.start_id, windows)
        tokens, lengths = self.packed(windows)
        lengths = [length for length in lengths if length]  # of others only the start id is left
        behind = (windows != ABSENT).cumsum(1).flatten()[tokens]  # the position behind the start id
        positions = torch.cat([behind.new_zeros(1), behind])
        x = self.words(torch.cat([tokens.new_full((1,), config.start_id), windows.flatten()[tokens] - 1])).float()
        if config.has_places:
            x = x + self.places[positions]
        last = (tokens % self.window.n == self.window.n - 1).nonzero()[:, 0]
        rows = tokens.new_zeros(len(windows)).index_copy(0, tokens[last] // self.window.n, last + 1)
        turn = turn_of(config, positions, x.dtype)
        attend = SinkAttention(lengths, self.heads)
        x = through(self.layers, x, attend, rows=rows, turn=turn) if len(self.layers) else x.index_select(0, rows)
        return (x - self.places[positions[rows]] if config.has_places else x).unsqueeze(1)

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
    """The part that runs for each request: gathered sums enter it, with the positions of their tokens, and pass its layers.

    Sums get position and segment, where the family learns them. Then layers that end in norms get normed sums. Layers that
    begin with norms take sums as they are, and what leaves them gets a last norm. A decoder's is turned into logits of the
    next token.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = config.heads
        if config.has_places:
            self.positions = nn.Embedding(config.positions, config.hidden)
        if config.segments:
            self.segments = nn.Embedding(config.segments, config.hidden)
        if config.enters_normed:
            self.norm = nn.LayerNorm(config.hidden, config.norm_eps if config.entry_eps is None else config.entry_eps)
        else:
            self.final_norm = norm_of(config)
        self.layers = Layers(Layer(config, number, config.lower_layers) for number in range(config.upper_layers))
        if config.is_decoder:
            self.next_token = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def enter(self, sums: Tensor, positions: Tensor, segments: Tensor | None = None) -> Tensor:
        if self.config.has_places:
            sums = sums + self.positions(positions)
        if self.config.segments:
            assert segments is not None
            sums = sums + self.segments(segments)
        return self.norm(sums) if self.config.enters_normed else sums

    def leave(self, x: Tensor) -> Tensor:
        """Returns what heads read of tokens that have passed some layers."""
        return x if self.config.enters_normed else self.final_norm(x)

    def forward(
        self,
        sums: Tensor,
        positions: Tensor,
        segments: Tensor | None,
        attend: Attend,
        adapters: Sequence[Adapt] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Takes and returns packed tokens x hidden, without the last norm. `adapters`: one function for each layer.

        `rows`: the tokens to return. A decoder has no segments, and its positions are those in the whole sequences.
        """
        turn = turn_of(self.config, positions, sums.dtype)
        return through(self.layers, self.enter(sums, positions, segments), attend, adapters, rows, turn)

    def logits(self, x: Tensor) -> Tensor:
        """Returns a decoder's logits of the token behind each row: rows x vocabulary, fp32."""
        return self.next_token(self.final_norm(x)).float()


def through(
    layers: Layers | Sequence[Plain],
    x: Tensor,
    attend: Attend,
    adapters: Sequence[Adapt] | None = None,
    rows: Tensor | None = None,
    turn: Rotation | None = None,
) -> Tensor:
    for i, layer in enumerate(layers):
        adapt = adapters[i] if adapters is not None else unchanged
        x = layer(x, attend, adapt, rows if i == len(layers) - 1 else None, turn)
    return x


def turn_of(config: BackboneConfig, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
    """Returns the rotation of tokens at these positions; None if the model does not rotate."""
    if config.rotary_base is None:
        return None
    return Rotation(positions, config.head_size, config.rotary_base, dtype, config.near_base)


def _without(start_id: int, windows: Tensor) -> Tensor:
    """Returns the windows without the start id where it is a window's first token."""
    first = (windows != ABSENT).long().argmax(1, keepdim=True)
    tokens = windows.gather(1, first)
    return windows.scatter(1, first, tokens.masked_fill(tokens == start_id + 1, ABSENT))
