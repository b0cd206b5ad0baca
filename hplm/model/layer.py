"""One transformer layer, which both stacks use, in training and in serving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig

QKV, ATTENTION_OUT, FFN_IN, FFN_OUT = "qkv", "attention_out", "ffn_in", "ffn_out"  # the projections of a layer

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Adapt = Callable[[str, Tensor, Tensor], Tensor]  # a projection, its input, its output -> the changed output

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise InvalidInput(f"activation {name!r} is not supported: choose {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def unchanged(at: str, before: Tensor, after: Tensor) -> Tensor:
    return after


class Layer(nn.Module):
    """BERT's post-norm layer over tokens x hidden. The caller passes attention, and a function that adapts projections."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.attention_out = nn.Linear(config.hidden, config.hidden)
        self.attention_norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.ffn_in = nn.Linear(config.hidden, config.intermediate)
        self.ffn_out = nn.Linear(config.intermediate, config.hidden)
        self.ffn_norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.activation = activation(config.activation)

    def forward(self, x: Tensor, attend: Attend, adapt: Adapt = unchanged, rows: Tensor | None = None) -> Tensor:
        """Returns all tokens, or only `rows`. Attention still reads all tokens; the rest of the layer computes only `rows`."""
        attended = attend(*adapt(QKV, x, self.qkv(x)).chunk(3, dim=-1))
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        # Added in place: no other step needs the projection's output, not even the backward pass. A new tensor costs more.
        x = self.attention_norm(adapt(ATTENTION_OUT, attended, self.attention_out(attended)).add_(x))
        inner = self.activation(adapt(FFN_IN, x, self.ffn_in(x)))
        return self.ffn_norm(adapt(FFN_OUT, inner, self.ffn_out(inner)).add_(x))


class Layers(nn.ModuleList):
    """A list of layers. A slice of it is a list of layers too."""

    if TYPE_CHECKING:  # a type checker knows its elements; at run time it is a plain ModuleList

        def __init__(self, layers: Iterable[Layer]) -> None: ...
        @overload
        def __getitem__(self, idx: slice) -> Layers: ...
        @overload
        def __getitem__(self, idx: int) -> Layer: ...
        def __getitem__(self, idx: int | slice) -> Layer | Layers: ...
        def __iter__(self) -> Iterator[Layer]: ...
