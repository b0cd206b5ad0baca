"""Packings: how the texts of a batch are arranged in the tensors of the shared layers. All give the same answers.

`naive` pads every text to the longest. `turbo` cuts the batch, longest first, into groups and pads each (TurboTransformers).
`concat` puts several texts end to end into rows and masks scores between them (TCB 4.1). `slotted` computes no scores between
the slots of a row (TCB 4.2). `packed` has no padding and no scores between texts.

Parameters follow the name: `concat:rows=64,length=400`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch

from hplm.arrays import Array
from hplm.engine.turbo import GroupCost, cheapest_cuts
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention, RowAttention
from hplm.model.layer import Attend


@dataclass(frozen=True)
class Arrangement:
    """One tensor: texts end to end, each followed by its padding."""

    texts: Array  # indexes of texts of the batch, in their order in the tensor
    lengths: Array  # tokens of each text
    rooms: Array  # tokens of each text with its padding
    width: int | None = None  # of attention's rows, each with whole texts; None: every text is a row by itself

    @property
    def rows(self) -> int:
        return int(self.rooms.sum())

    @property
    def starts(self) -> Array:
        return np.cumsum(self.rooms) - self.rooms

    def attention(self, heads: int, device: torch.device, dtype: torch.dtype) -> Attend:
        if self.width is None:
            return PackedAttention(self.lengths.tolist(), heads, device)
        return RowAttention(self.lengths, self.rooms, self.width, heads, device, dtype)


class Packing(Protocol):
    def arrange(self, lengths: Array) -> list[Arrangement]:
        """Returns arrangements that contain every text once."""
        ...


@dataclass(frozen=True)
class Packed:
    """One row without padding. Texts of equal length are neighbours, which makes attention on a CPU faster."""

    def arrange(self, lengths: Array) -> list[Arrangement]:
        return [_packed(_longest_first(lengths), lengths)]


@dataclass(frozen=True)
class Naive:
    def arrange(self, lengths: Array) -> list[Arrangement]:
        return [_padded(np.arange(len(lengths)), lengths)]


@dataclass(frozen=True)
class Turbo:
    cost: GroupCost  # seconds by number and length of texts

    def arrange(self, lengths: Array) -> list[Arrangement]:
        order = _longest_first(lengths)
        return [_padded(group, lengths) for group in np.split(order, cheapest_cuts(lengths[order], self.cost))]


@dataclass(frozen=True)
class Concat:
    """`rows` (B) rows of `length` (L) tokens in a tensor. Longer texts go into a tensor of their own, without padding."""

    rows: int = 64
    length: int = 512

    def arrange(self, lengths: Array) -> list[Arrangement]:
        return _boxed(lengths, self.length, self.rows)


@dataclass(frozen=True)
class Slotted:
    """As `concat`, with each row cut into slots of `slot` (z) tokens. 0: as long as the longest text that fits a row."""

    rows: int = 64
    length: int = 512
    slot: int = 0

    def arrange(self, lengths: Array) -> list[Arrangement]:
        fitting = lengths[lengths <= self.length]
        slot = min(self.slot, self.length) or (int(fitting.max()) if len(fitting) else self.length)
        return _boxed(lengths, slot, self.rows * (self.length // slot))


PACKINGS: dict[str, type] = {"packed": Packed, "naive": Naive, "turbo": Turbo, "concat": Concat, "slotted": Slotted}


def read_packing(given: str, measure: Callable[[int, int], float]) -> Packing:
    """Reads a model's parameter `packing`. `measure(texts, tokens)` returns the seconds that such a group takes."""
    name, _, options = given.partition(":")
    if name not in PACKINGS:
        raise InvalidInput(f"unknown packing {name!r}: choose one of {', '.join(PACKINGS)}")
    kind = PACKINGS[name]
    if kind is Turbo:
        if options:
            raise InvalidInput(f"packing {given!r} has options, but turbo takes no options: write 'turbo'")
        return Turbo(GroupCost.measured(measure))
    known = [field.name for field in fields(kind)]
    chosen: dict[str, int] = {}
    for option in options.split(",") if options else []:
        key, _, value = option.partition("=")
        if key not in known or not value.isdecimal() or not (int(value) or key == "slot"):
            allowed = f"whole numbers for {', '.join(known)}" if known else "no options"
            raise InvalidInput(f"packing {given!r} has the invalid option {option!r}: {name} takes {allowed}")
        chosen[key] = int(value)
    return kind(**chosen)


def _longest_first(lengths: Array) -> Array:
    return np.argsort(-lengths, kind="stable")


def _packed(texts: Array, lengths: Array) -> Arrangement:
    return Arrangement(texts, lengths[texts], lengths[texts])


def _padded(texts: Array, lengths: Array) -> Arrangement:
    mine = lengths[texts]
    width = int(mine.max())
    return Arrangement(texts, mine, np.full(len(texts), width), width)


def _boxed(lengths: Array, size: int, boxes: int) -> list[Arrangement]:
    """Puts texts into boxes of `size` tokens, with `boxes` boxes in a tensor. Longer texts go into a tensor without padding."""
    order = _longest_first(lengths)
    large, order = order[lengths[order] > size], order[lengths[order] <= size]
    box = _first_fit(lengths[order], size)
    arrangements = [_packed(large, lengths)] if len(large) else []
    for first in range(0, int(box.max(initial=-1)) + 1, boxes):
        here = (box >= first) & (box < first + boxes)
        by_box = np.argsort(box[here], kind="stable")
        texts, of = order[here][by_box], box[here][by_box] - first
        filled = np.bincount(of, lengths[texts]).astype(np.int64)
        width = int(filled.max())
        rooms = lengths[texts].copy()
        rooms[np.flatnonzero(np.diff(of, append=-1))] += width - filled  # the last text of a box takes the rest as padding
        arrangements.append(Arrangement(texts, lengths[texts], rooms, width))
    return arrangements


def _first_fit(lengths: Array, size: int) -> Array:
    """Returns the box of each text. With texts longest first, it takes at most 11/9 of the fewest boxes possible."""
    free = np.full(len(lengths), size)
    box = np.empty(len(lengths), dtype=np.int64)
    for text, length in enumerate(lengths.tolist()):
        box[text] = int((free >= length).argmax())
        free[box[text]] -= length
    return box
