"""Layouts of records: the tensors of a kind of adapter or head, and how they are applied to the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod

import torch
from torch import Tensor

from hplm.adapters.groups import STEP, Groups, InPlace, Map, Runs, Tiles
from hplm.errors import Broken, InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.layer import ATTENTION_OUT, FFN_IN, FFN_OUT, KEY_VALUE, QKV, QUERY, activation
from hplm.options import BANK_DTYPES

TORCH_DTYPES: dict[str, torch.dtype] = dict(zip(BANK_DTYPES, (torch.float16, torch.bfloat16), strict=True))
PROJECTIONS = {"query": QKV, "key": QKV, "value": QKV, "attention_out": ATTENTION_OUT, "ffn_in": FFN_IN, "ffn_out": FFN_OUT}
GATED_PROJECTIONS = {**PROJECTIONS, "ffn_gate": FFN_IN}  # of layers with a gate

EXIT = "exit"  # the kind of the heads of exits
ALL = slice(None)  # outputs of a product
EXIT_WIDTH = 32  # of what lies between the two layers of an exit's head

Weights = Mapping[str, Tensor]  # tensors of one layer, slots x ...
Shape = Callable[[int, int, int], tuple[int, ...]]  # of a rank, and the widths of what goes into a projection and comes out
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """One kind and size of record. `size` is the rank of an adapter or the number of labels of a head.

    `places` are the projections of a layer that an adapter changes. A head has none.
    """

    kind: str
    size: int
    hidden: int
    layers: int
    places: tuple[str, ...] = ()
    intermediate: int = 0
    function: str = "relu"  # inside a bottleneck, or between the two layers of a head
    dtype: str = "fp16"
    query_width: int = 0  # of the layers; 0: hidden
    key_width: int = 0  # of keys and of values; 0: hidden
    gated: bool = False

    def __post_init__(self) -> None:
        numbers = self.size, self.hidden, self.layers, self.intermediate, self.query_width, self.key_width
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise InvalidInput(f"a layout of these sizes is impossible: {numbers}. Give whole numbers")
        if self.kind not in KINDS:
            raise InvalidInput(f"unknown kind of record {self.kind!r}: choose {', '.join(KINDS)}")
        if self.dtype not in TORCH_DTYPES:
            raise InvalidInput(f"unknown dtype of a record {self.dtype!r}: choose {', '.join(TORCH_DTYPES)}")
        for place in self.places:
            if place not in self.projections:
                raise InvalidInput(f"a layer has no projection {place!r}: choose {', '.join(self.projections)}")
        if len(set(self.places)) < len(self.places):
            raise InvalidInput(f"the projections {', '.join(self.places)} contain one twice: name each once")
        activation(self.function)  # raises if it is unknown

    def __hash__(self) -> int:  # computed once: every batch looks up layouts many times
        return self._hash

    @cached_property
    def _hash(self) -> int:  # of numbers, so that it is the same in other processes
        return hash((self.size, self.hidden, self.layers, len(self.places)))

    @property
    def projections(self) -> dict[str, str]:
        """The places of a layer, each with the product that computes it."""
        return GATED_PROJECTIONS if self.gated else PROJECTIONS

    @cached_property
    def shapes(self) -> Shapes:
        """The tensors of one layer, in their order in the record."""
        return KINDS[self.kind].shapes(self)

    @cached_property
    def in_slots(self) -> Layout:
        """The same with the rank that a slot has room for: compiled kernels take only some. What is added is zero."""
        return replace(self, size=-(-self.size // STEP) * STEP) if self.places else self

    @property
    def drawn(self) -> list[str]:
        """The tensors that training starts from random numbers. The others start at zero."""
        return [name for name in self.shapes if name.endswith(KINDS[self.kind].drawn)]

    @property
    def layer_size(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def weight_bytes(self) -> int:
        return self.layers * self.layer_size * self.torch_dtype.itemsize

    @cached_property
    def key(self) -> str:
        """All of it in one word, from which `of` makes it again."""
        sizes = (self.size, self.hidden, self.layers, self.intermediate, self.query_width, self.key_width, int(self.gated))
        return ",".join((self.kind, "+".join(self.places), self.function, self.dtype, *map(str, sizes)))

    @classmethod
    @cache
    def of(cls, key: str) -> Layout:
        try:
            kind, places, function, dtype, *numbers = key.split(",")
            size, hidden, layers, intermediate, query, key_width, gated = map(int, numbers)
        except ValueError:
            raise Broken(f"{key!r} is no layout of a record: export the repository again with --replace") from None
        own = tuple(places.split("+")) if places else ()
        return cls(kind, size, hidden, layers, own, intermediate, function, dtype, query, key_width, bool(gated))

    @property
    def name(self) -> str:
        """A short name for metrics. Every layout of a backbone has another."""
        parts = [self.kind, f"{self.size}x{self.layers}" if self.places else str(self.size)]
        if self.places and self.places != KINDS[self.kind].usual_places:
            parts.append("+".join(self.places))
        if self.function != "relu":
            parts.append(self.function)
        if self.dtype != "fp16":
            parts.append(self.dtype)
        return "-".join(parts)

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    def computed_in(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the precision in which an engine of `dtype` computes it.

        A head's few rows always take 32 bits: 16 bits cannot separate values far from 0.
        """
        return dtype if self.places else torch.float32

    def empty(self, pin: bool = False) -> Tensor:
        """Returns an uninitialised tensor for one record's weights."""
        return torch.empty(self.layers, self.layer_size, dtype=self.torch_dtype, pin_memory=pin)

    def unpack(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """Returns the tensors of each layer as views of layers x layer_size."""
        sizes = [prod(shape) for shape in self.shapes.values()]
        return [
            {
                name: _lying(part, shape)
                for (name, shape), part in zip(self.shapes.items(), layer.split_with_sizes(sizes), strict=True)
            }
            for layer in flat
        ]

    def allocate(self, slots: int, devices: Sequence[torch.device], dtype: torch.dtype) -> list[dict[str, Tensor]]:
        """Returns zeros for that many slots: for each layer its tensors as slots x ..., with the ranks of `in_slots`."""
        return [
            {
                name: _lying(torch.zeros(slots * prod(shape), device=own, dtype=dtype), shape, slots)
                for name, shape in self.in_slots.shapes.items()
            }
            for own in devices
        ]

    def pack(self, layers: Sequence[Mapping[str, Tensor]]) -> Tensor:
        flat = self.empty()
        for target, source in zip(self.unpack(flat), layers, strict=True):
            for name, tensor in target.items():
                tensor.copy_(source[name])
        return flat

    def width(self, place: str) -> tuple[int, int]:
        """Returns the input and output widths of a projection."""
        narrow, wide = self.hidden, self.intermediate
        query, key = self.query_width or narrow, self.key_width or narrow
        outputs = {"query": query, "key": key, "value": key, "ffn_in": wide, "ffn_gate": wide}
        inputs = {"attention_out": query, "ffn_out": wide}
        return inputs.get(place, narrow), outputs.get(place, narrow)

    def outputs(self, place: str) -> slice:
        """Returns where the outputs of a projection lie in those of its product, which may compute several projections."""
        query, key = self.width("query")[1], self.width("key")[1]
        before = {"key": query, "value": query + key, "ffn_in": self.intermediate if self.gated else 0}.get(place, 0)
        return slice(before, before + self.width(place)[1])

    @cached_property
    def maps(self) -> dict[str, list[tuple[slice, list[str]]]]:
        """The products whose outputs an adapter changes: which outputs each map changes, and the names of its tensors."""
        maps: dict[str, list[tuple[slice, list[str]]]] = {}
        for place in self.places:
            at = self.projections[place]
            outputs = self.outputs(place) if at == QKV or self.gated else ALL
            names = [f"{place}/{name}" for name in KINDS[self.kind].tensors]
            maps.setdefault(at, []).append((outputs, names))
            if at == QKV:
                own, before = (QUERY, 0) if place == QUERY else (KEY_VALUE, self.width("query")[1])
                maps.setdefault(own, []).append((slice(outputs.start - before, outputs.stop - before), names))
        return maps

    def way(self, device: torch.device, dtype: torch.dtype) -> type[Groups]:
        """Returns how the device maps rows fastest by the weights of slots."""
        shapes = self.in_slots.shapes.values()
        return next(way for way in (InPlace, Runs, Tiles) if way.takes(device, dtype, shapes))

    def adapt(self, at: str, before: Tensor, after: Tensor, groups: Groups, weights: Weights) -> Tensor:
        """Returns the adapted output of a projection (`hplm.model.layer`), given its input and output. May change `after`."""
        return KINDS[self.kind].adapt(self, at, before, after, groups, weights)

    def read(self, x: Tensor, groups: Groups, weights: Weights) -> Tensor:
        """Returns a head's logits."""
        return KINDS[self.kind].read(self, x, groups, weights)


def _lying(flat: Tensor, shape: tuple[int, ...], *slots: int) -> Tensor:
    """Returns a view of `flat` whose matrices are stored as inputs x outputs, as products read them.

    CPUs multiply small matrices up to three times as fast that way.
    """
    if len(shape) == 1:
        return flat.view(*slots, *shape)
    return flat.view(*slots, *reversed(shape)).mT


class Kind:
    usual_places: tuple[str, ...] = ()
    tensors: Mapping[str, Shape] = {}  # of one place, in their order in the record
    drawn: tuple[str, ...]  # endings of the names of randomly initialised tensors

    def shapes(self, layout: Layout) -> Shapes:
        """Returns the tensors of a layer, in their order in the record."""
        own = self.tensors.items()
        return {f"{place}/{name}": shape(layout.size, *layout.width(place)) for place in layout.places for name, shape in own}

    def adapt(self, layout: Layout, at: str, before: Tensor, after: Tensor, groups: Groups, weights: Weights) -> Tensor:
        raise TypeError(f"{layout.kind} is not an adapter")

    def read(self, layout: Layout, x: Tensor, groups: Groups, weights: Weights) -> Tensor:
        raise TypeError(f"{layout.kind} is not a head")


class Bottleneck(Kind):
    """h + W_up . f(W_down . h), on the output of a projection (HMI 3.2.2: after attention)."""

    usual_places = ("attention_out",)
    tensors: Mapping[str, Shape] = {
        "down": lambda rank, into, out: (rank, out),
        "down_bias": lambda rank, into, out: (rank,),
        "up": lambda rank, into, out: (out, rank),
        "up_bias": lambda rank, into, out: (out,),
    }
    drawn = ("/down",)

    def adapt(self, layout: Layout, at: str, before: Tensor, after: Tensor, groups: Groups, weights: Weights) -> Tensor:
        for outputs, names in layout.maps.get(at, ()):
            base = after[:, outputs]
            spread = groups.spread(base)
            if torch.is_grad_enabled():
                after = after.clone()  # the backward pass needs the input of the map
                base = after[:, outputs]
            down, down_bias, up, up_bias = (weights[name] for name in names)
            groups.add_low_rank(base, spread, Map(down, down_bias), Map(up, up_bias), layout.function)
        return after


class LowRank(Kind):
    """W . x + B . A . x, on any projection (LoRA). Its scale is multiplied into B."""

    usual_places = ("query", "value")
    tensors: Mapping[str, Shape] = {"a": lambda rank, into, out: (rank, into), "b": lambda rank, into, out: (out, rank)}
    drawn = ("/a",)

    def adapt(self, layout: Layout, at: str, before: Tensor, after: Tensor, groups: Groups, weights: Weights) -> Tensor:
        if here := layout.maps.get(at):
            spread = groups.spread(before)
            for outputs, (down, up) in here:
                groups.add_low_rank(after[:, outputs], spread, Map(weights[down]), Map(weights[up]))
        return after


class LinearHead(Kind):
    drawn = ("weight",)

    def shapes(self, layout: Layout) -> Shapes:
        return {"weight": (layout.size, layout.hidden), "bias": (layout.size,)}

    def read(self, layout: Layout, x: Tensor, groups: Groups, weights: Weights) -> Tensor:
        return groups.collect(groups.linear(groups.spread(x), weights["weight"], weights["bias"]))


class TwoLayerHead(Kind):
    """W . f(D . x), which imported models often have, and exits."""

    drawn = ("dense", "weight")

    def __init__(self, states: int = 1) -> None:
        """`states`: how many of the width of the layers a row has."""
        self._states = states

    def shapes(self, layout: Layout) -> Shapes:
        inner = layout.intermediate or layout.hidden
        return {
            "dense": (inner, self._states * layout.hidden),
            "dense_bias": (inner,),
            "weight": (layout.size, inner),
            "bias": (layout.size,),
        }

    def read(self, layout: Layout, x: Tensor, groups: Groups, weights: Weights) -> Tensor:
        inner = activation(layout.function)(groups.linear(groups.spread(x), weights["dense"], weights["dense_bias"]))
        return groups.collect(groups.linear(inner, weights["weight"], weights["bias"]))


KINDS: dict[str, Kind] = {
    "bottleneck": Bottleneck(),
    "lora": LowRank(),
    "head": LinearHead(),
    "head2": TwoLayerHead(),
    EXIT: TwoLayerHead(2),  # a token, and the mean of its text's tokens; layer k of a record is the head of exit k
}


def adapter_layout(
    config: BackboneConfig,
    kind: str,
    rank: int,
    places: tuple[str, ...] | None = None,
    function: str = "relu",
    dtype: str = "fp16",
) -> Layout | None:
    """Returns the layout of an adapter, or None for rank 0."""
    if kind not in (adapters := [name for name, own in KINDS.items() if own.usual_places]):
        raise InvalidInput(f"unknown adapter kind {kind!r}: choose {' or '.join(adapters)}")
    if not rank:
        return None
    places = places or KINDS[kind].usual_places
    query, key = (0 if width == config.hidden else width for width in (config.query_width, config.key_width))
    return Layout(
        kind, rank, config.hidden, config.upper_layers, places, config.intermediate, function, dtype, query, key, config.gated
    )


def every_place(config: BackboneConfig) -> tuple[str, ...]:
    """Returns all projections of a layer."""
    return tuple(GATED_PROJECTIONS if config.gated else PROJECTIONS)


def head_layout(config: BackboneConfig, labels: int, function: str | None = None, dtype: str = "fp16") -> Layout:
    """Returns the layout of a linear head, or of one with two layers and a function between them."""
    if function is None:
        return Layout("head", labels, config.hidden, 1, dtype=dtype)
    return Layout("head2", labels, config.hidden, 1, function=function, dtype=dtype)


def exit_layout(config: BackboneConfig, outputs: int, dtype: str = "fp16") -> Layout:
    """Returns the layout of the heads of a tenant's exits: one before each layer."""
    return Layout(EXIT, outputs, config.hidden, config.upper_layers, intermediate=EXIT_WIDTH, dtype=dtype)
