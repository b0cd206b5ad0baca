"""Packings: how the texts of a batch are arranged in the tensors of the shared layers. All give the same answers.

`naive` pads every text to the longest. `turbo` cuts the batch, longest first, into groups and pads each (TurboTransformers).
`concat` puts several texts end to end into rows and masks scores between them (TCB 4.1). `slotted` computes no scores between
the slots of a row (TCB 4.2). `packed` has no padding and no scores between texts.

Parameters follow the name: `concat:rows=64,length=400`.

A policy may have chosen rows and slots for the texts (`Places`). `concat` and `slotted` use them unless they exceed their own
limits, and otherwise fill rows and slots by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import torch

from hplm.arrays import Array
from hplm.engine.turbo import GroupCost, cheapest_cuts
from hplm.errors import InvalidInput
from hplm.model.attention import CrossAttention, PackedAttention, RowAttention, RowCrossAttention
from hplm.model.layer import Attend
from hplm.model.sizes import LEAST_STEP, rounded_up
from hplm.scheduling.filling import first_fit
from hplm.scheduling.selection import OUTSIDE, Places


@dataclass(frozen=True)
class Arrangement:
    """One tensor: texts end to end, each followed by its padding."""

    texts: Array  # indexes of texts of the batch, in their order in the tensor
    lengths: Array  # tokens of each text
    rooms: Array  # tokens of each text with its padding; without a width only the last one has any
    width: int | None = None  # of attention's rows, each with whole texts; None: every text is a row by itself

    @property
    def rows(self) -> int:
        return int(self.rooms.sum())

    def rounded_up(self) -> Arrangement:
        """Returns it with rows behind the last text, so that there are few different sizes.

        One with a width stays as it is.
        """
        more = rounded_up(self.rows) - self.rows
        if self.width is not None or not more:
            return self
        return replace(self, rooms=np.append(self.rooms[:-1], self.rooms[-1] + more))

    @property
    def starts(self) -> Array:
        return np.cumsum(self.rooms) - self.rooms

    @property
    def tokens(self) -> Array:
        """The places of all tokens, without padding."""
        padding = self.rooms - self.lengths
        return np.arange(int(self.lengths.sum())) + np.repeat(np.cumsum(padding) - padding, self.lengths)

    def attention(self, heads: int, device: torch.device, dtype: torch.dtype, causal: bool = False) -> Attend:
        """`causal`: a token attends to itself and to those before it."""
        if self.width is None:
            behind, rest = divmod(self.rows - int(self.lengths.sum()), LEAST_STEP)  # rows that see only each other, like texts
            lengths = [*self.lengths.tolist(), *[LEAST_STEP] * behind, *[rest] * (rest > 0)]
            return PackedAttention(lengths, heads, device, causal)
        return RowAttention(self.lengths, self.rooms, self.width, heads, device, dtype, causal)

    def cross_attention(self, sources: Arrangement, heads: int, device: torch.device, dtype: torch.dtype) -> Attend:
        """Returns the attention of targets to their `sources`, beside which they are arranged."""
        if self.width is None:
            return CrossAttention(self.lengths.tolist(), sources.lengths.tolist(), heads)
        rows = self.rows // self.width
        return RowCrossAttention(self.rooms, sources.lengths, sources.rooms, rows, heads, device, dtype)

    def beside(self, lengths: Array) -> Arrangement:
        """Returns texts with other lengths in the same order and rows: the targets of these sources."""
        mine = lengths[self.texts]
        if self.width is None:
            return Arrangement(self.texts, mine, mine)
        return _in_rows(self.texts, lengths, self.starts // self.width)


class Packing(Protocol):
    def arrange(self, lengths: Array, places: Places | None = None) -> list[Arrangement]:
        """Returns arrangements that contain every text once. `places` are those that the policy has chosen."""
        ...


@dataclass(frozen=True)
class Packed:
    """One row without padding. Texts of equal length are neighbours, which makes attention on a CPU faster."""

    def arrange(self, lengths: Array, places: Places | None = None) -> list[Arrangement]:
        return [_packed(_longest_first(lengths), lengths)]


@dataclass(frozen=True)
class Naive:
    def arrange(self, lengths: Array, places: Places | None = None) -> list[Arrangement]:
        return [_padded(np.arange(len(lengths)), lengths)]


@dataclass(frozen=True)
class Turbo:
    cost: GroupCost  # seconds by number and length of texts

    def arrange(self, lengths: Array, places: Places | None = None) -> list[Arrangement]:
        order = _longest_first(lengths)
        return [_padded(group, lengths) for group in np.split(order, cheapest_cuts(lengths[order], self.cost))]


@dataclass(frozen=True)
class Concat:
    """`rows` (B) rows of `length` (L) tokens in a tensor. Longer texts go into a tensor of their own, without padding."""

    rows: int = 64
    length: int = 512

    def arrange(self, lengths: Array, places: Places | None = None) -> list[Arrangement]:
        box = _handed_over(lengths, None if places is None else places.row, self.length)
        return _boxed(lengths, _first_fit(lengths, self.length) if box is None else box, self.rows)


@dataclass(frozen=True)
class Slotted:
    """As `concat`, with each row cut into slots of `slot` (z) tokens. 0: as long as the longest text that fits a row."""

    rows: int = 64
    length: int = 512
    slot: int = 0

    def arrange(self, lengths: Array, places: Places | None = None) -> list[Arrangement]:
        slot = min(self.slot, self.length)
        box = _handed_over(lengths, None if places is None else places.slot, slot or self.length)
        if box is None:
            slot = slot or int(lengths[lengths <= self.length].max(initial=1))
            box = _first_fit(lengths, slot)
        slot = slot or int(_filled(lengths, box).max(initial=1))
        return _boxed(lengths, box, self.rows * (self.length // slot))


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


def _boxed(lengths: Array, box: Array, boxes: int) -> list[Arrangement]:
    """Puts each text into its box, with `boxes` boxes of equal width in a tensor. Texts outside get one without padding."""
    order = _longest_first(lengths)
    outside, order = order[box[order] == OUTSIDE], order[box[order] != OUTSIDE]
    arrangements = [_packed(outside, lengths)] if len(outside) else []
    order = order[np.argsort(box[order], kind="stable")]
    _, number = np.unique(box[order], return_inverse=True)
    tensor = number // boxes
    for which in range(int(tensor.max(initial=-1)) + 1):
        arrangements.append(_in_rows(order[tensor == which], lengths, number[tensor == which] - which * boxes))
    return arrangements


def _in_rows(texts: Array, lengths: Array, row: Array) -> Arrangement:
    """Puts texts into rows of equal width. `row`: that of each text. The last text of a row takes the rest as padding."""
    filled = np.bincount(row, lengths[texts]).astype(np.int64)
    width = int(filled.max())
    rooms = lengths[texts].copy()
    rooms[np.flatnonzero(np.diff(row, append=-1))] += width - filled
    return Arrangement(texts, lengths[texts], rooms, width)


def _handed_over(lengths: Array, box: Array | None, size: int) -> Array | None:
    """Returns the boxes that the policy has chosen, or None if it has chosen none, or one of them is longer than `size`."""
    if box is None or _filled(lengths, box).max(initial=0) > size:
        return None
    return box


def _filled(lengths: Array, box: Array) -> Array:
    """Returns the tokens in each box."""
    inside = box != OUTSIDE
    _, of = np.unique(box[inside], return_inverse=True)
    return np.bincount(of, lengths[inside]).astype(np.int64)


def _first_fit(lengths: Array, size: int) -> Array:
    """Returns the box of each text, OUTSIDE for longer ones. Longest first, at most 11/9 of the fewest boxes are taken."""
    order, box = _longest_first(lengths), np.empty(len(lengths), dtype=np.int64)
    box[order] = first_fit(lengths[order], size, len(lengths))
    return box
