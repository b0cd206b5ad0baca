"""One transformer layer, which both stacks use, in training and in serving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hplm.errors import InvalidInput
from hplm.model.config import LAYER_NORM, RMS, BackboneConfig

QKV, ATTENTION_OUT, FFN_IN, FFN_OUT = "qkv", "attention_out", "ffn_in", "ffn_out"  # the projections of a layer
QUERY, KEY_VALUE = "query", "key_value"  # instead of QKV, where few queries are needed
WORTH = 64  # queries that nobody needs, to compute the others alone

# Takes the layer's number in its stack, query, key, value; in near layers also `near`, the tokens to each side.
Attend = Callable[..., Tensor]
Function = Callable[[Tensor], Tensor]
Adapt = Callable[[str, Tensor, Tensor], Tensor]  # a projection, its input, its output -> the changed output
Plain = Callable[..., Tensor]  # a layer that calls no modules

ACTIVATIONS: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu_norm": lambda x: F.layer_norm(F.gelu(x), x.shape[-1:]),
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def activation(name: str) -> Function:
    if name not in ACTIVATIONS:
        raise InvalidInput(f"activation {name!r} is not supported: choose {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def unchanged(at: str, before: Tensor, after: Tensor) -> Tensor:
    return after


def plain(part: nn.Module) -> Function:
    """Returns what a linear layer or a norm computes with its weights, without a call of a module."""
    if isinstance(part, nn.Linear):
        weight, bias = part.weight, part.bias
        return lambda x: F.linear(x, weight, bias)
    if isinstance(part, nn.LayerNorm):
        shape, scale, shift, eps = part.normalized_shape, part.weight, part.bias, part.eps
        return lambda x: torch.layer_norm(x, shape, scale, shift, eps)
    return part.forward


def norm_of(config: BackboneConfig, width: int | None = None) -> nn.LayerNorm | nn.RMSNorm:
    """`width`: default: hidden."""
    width = width or config.hidden
    if config.norm == RMS:
        return nn.RMSNorm(width, config.norm_eps)
    return nn.LayerNorm(width, config.norm_eps, bias=config.norm == LAYER_NORM)


class Rotation:
    """The rotation of packed tokens, which all layers share: queries and keys turn by an angle that grows with the position.

    As in Hugging Face's models, the two numbers that are rotated together are half a head apart.
    """

    def __init__(self, positions: Tensor, head: int, base: float, dtype: torch.dtype, near_base: float | None = None) -> None:
        """`head`: the numbers of a head. `near_base`: of near layers, if they have another."""
        self.near = self if near_base is None else Rotation(positions, head, near_base, dtype)
        frequencies = 1.0 / base ** (torch.arange(0, head, 2, dtype=torch.float32, device=positions.device) / head)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.stack([cos, cos], 1).to(dtype)[:, None]  # tokens x 1 x 2 x half a head
        self._sin = torch.stack([-sin, sin], 1).to(dtype)[:, None]

    def split(self, projected: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries, rotated keys and values of such widths, which lie side by side in `projected`."""
        query, key, _ = widths
        both = projected[:, : query + key]
        pairs = both.view(len(both), -1, 2, self._cos.shape[-1])  # tokens x heads x 2 x half a head
        turned = torch.addcmul(pairs * self._cos, pairs.flip(2), self._sin).flatten(1)
        return turned[:, :query], turned[:, query:], projected[:, query + key :]


class Layer(nn.Module):
    """A layer over tokens x hidden: with norms behind its two parts, as BERT's, or before them, as a decoder's.

    The caller passes attention, and a function that adapts projections.
    """

    query: Function | None = None  # a plain layer has it and `key_value` after `put_query_apart`
    key_value: Function

    def __init__(self, config: BackboneConfig, number: int = 0, below: int = 0) -> None:
        """`below`: how many layers of the whole model are below its stack."""
        super().__init__()
        self.number = number  # in its stack
        near = config.near_in(below + number)
        self._near = {} if near is None else {"near": near}
        self._widths, self._head = [config.query_width, config.key_width, config.key_width], config.head_size
        self._pre_norm, self._gated, self._head_norms = config.pre_norm, config.gated, config.head_norms
        self.qkv = nn.Linear(config.hidden, sum(self._widths), config.has_bias(QKV))
        if config.head_norms:
            self.query_norm, self.key_norm = (norm_of(config, config.head_size) for _ in range(2))
        self.attention_out = nn.Linear(config.query_width, config.hidden, config.has_bias(ATTENTION_OUT))
        is_normed = config.pre_norm and config.normed_words and not config.is_decoder and below + number == 0
        self.attention_norm = nn.Identity() if is_normed else norm_of(config)
        # If gated, it has two parts, the gate first.
        self.ffn_in = nn.Linear(config.hidden, config.intermediate * (2 if config.gated else 1), config.has_bias(FFN_IN))
        self.ffn_out = nn.Linear(config.intermediate, config.hidden, config.has_bias(FFN_OUT))
        self.ffn_norm = norm_of(config)
        self.activation = activation(config.activation)

    def forward(
        self, x: Tensor, attend: Attend, adapt: Adapt = unchanged, rows: Tensor | None = None, turn: Rotation | None = None
    ) -> Tensor:
        """Returns all tokens, or only `rows`. Attention still reads all tokens; the rest of the layer computes only `rows`.

        `turn` rotates queries and keys.
        """
        read = self.attention_norm(x) if self._pre_norm else x
        if self.query is not None and rows is not None and len(read) - len(rows) >= WORTH:
            own = read.index_select(0, rows)
            own = adapt(QUERY, own, self.query(own))
            query = own.new_empty(len(read), own.shape[1]).index_copy_(0, rows, own)  # no other row is read
            key, value = adapt(KEY_VALUE, read, self.key_value(read)).split_with_sizes(self._widths[1:], dim=-1)
        else:
            projected = adapt(QKV, read, self.qkv(read))
            if self._head_norms:
                projected = self._normed(projected)
            if turn is None:
                query, key, value = projected.split_with_sizes(self._widths, dim=-1)
            else:
                query, key, value = (turn.near if self._near else turn).split(projected, self._widths)
        attended = attend(self.number, query, key, value, **self._near)
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        # Added in place: no other step needs the projection's output, not even the backward pass. A new tensor costs more.
        x = adapt(ATTENTION_OUT, attended, self.attention_out(attended)).add_(x)
        read = self.ffn_norm(x) if self._pre_norm else self.attention_norm(x)
        inner = adapt(FFN_IN, read, self.ffn_in(read))
        inner = self._gate(inner) if self._gated else self.activation(inner)
        out = adapt(FFN_OUT, inner, self.ffn_out(inner))
        return out.add_(x) if self._pre_norm else self.ffn_norm(out.add_(read))

    def _normed(self, projected: Tensor) -> Tensor:
        """Returns queries and keys with each head by its norm, and the values."""
        parts = zip((self.query_norm, self.key_norm), projected.split_with_sizes(self._widths, dim=-1), strict=False)
        normed = [norm(own.unflatten(-1, (-1, self._head))).flatten(-2) for norm, own in parts]
        return torch.cat([*normed, projected[..., -self._widths[2] :]], -1)

    def put_query_apart(self) -> None:
        """Lets the plain layer compute few rows' queries alone.

        It must have biases and no norms of heads, and queries and keys must not turn.
        """
        width = self._widths[0]
        self.query, self.key_value = _part(self.qkv, slice(width)), _part(self.qkv, slice(width, None))

    def plain(self) -> Plain:
        """Returns `forward` with the weights that it has now. It calls no modules: that takes longer than small products."""
        own = copy(self)
        own.__dict__.update({name: plain(part) for name, part in self.named_children()})
        return own.forward

    def _gate(self, both: Tensor) -> Tensor:
        gate, inner = both.chunk(2, dim=-1)
        return self.activation(gate) * inner


def _part(linear: nn.Linear, outputs: slice) -> nn.Linear:
    """Returns a linear layer that computes some of the outputs, with the same weights."""
    part = nn.Linear(1, 1, device="meta")
    part.weight, part.bias = (nn.Parameter(own[outputs], requires_grad=False) for own in (linear.weight, linear.bias))
    return part


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
