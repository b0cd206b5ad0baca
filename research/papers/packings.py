"""Packings of papers, which a model's parameter `packing` names. All give the same answers as texts that lie end to end.

`naive` pads every text to the longest. `turbo` cuts the batch, longest first, into groups and pads each (TurboTransformers,
after TCB 6.1). `concat` puts several texts end to end into rows and masks scores between them (TCB 4.1). `slotted` computes no
scores between the slots of a row (TCB 4.2). Attention masks scores between texts, also of targets to
their sources (Eq. 5 to 8).

Parameters follow the name: `concat:rows=64,length=400`. A policy may have chosen rows and slots for the texts (`Places`).
`concat` and `slotted` use them unless they exceed their own limits, and otherwise fill rows and slots by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, product

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hplm.arrays import Array
from hplm.engine.packing import Arrangement, end_to_end
from hplm.errors import InvalidInput
from hplm.model.attention import end_to_end as flattened
from hplm.model.attention import heads_of
from hplm.model.layer import Attend
from hplm.model.tensors import sent
from hplm.scheduling.filling import first_fit
from hplm.scheduling.selection import OUTSIDE, Places

Measure = Callable[[int, int], float]  # returns the seconds of so many texts of so many tokens
COUNTS = (1, 4, 16, 64)  # measured numbers of texts in a group
WIDTHS = (4, 16, 48, 128)  # measured tokens of a text


@dataclass
class Rows(Arrangement):
    """Rows of equal width, each with whole texts."""

    width: int

    def attention(self, heads: int, device: torch.device, dtype: torch.dtype, causal: bool = False) -> Attend:
        """`causal`: a token attends to itself and to those before it."""
        return RowAttention(self.rooms, self.lengths, self.rooms, self.rows // self.width, heads, device, dtype, causal)

    def rounded_up(self) -> Arrangement:
        return self


def causal_attention(laid: Arrangement, heads: int, device: torch.device, dtype: torch.dtype) -> Attend:
    """Returns attention with which a token sees itself and those before it."""
    if isinstance(laid, Rows):
        return laid.attention(heads, device, dtype, causal=True)
    lengths = laid.lengths.tolist()
    return CrossAttention(lengths, lengths, heads, causal=True)


def cross_attention(laid: Arrangement, sources: Arrangement, heads: int, device: torch.device, dtype: torch.dtype) -> Attend:
    """Returns the attention of targets to their `sources`, beside which they are laid."""
    if not isinstance(laid, Rows):
        return CrossAttention(laid.lengths.tolist(), sources.lengths.tolist(), heads)
    return RowAttention(laid.rooms, sources.lengths, sources.rooms, laid.rows // laid.width, heads, device, dtype)


def beside(sources: Arrangement, lengths: Array) -> Arrangement:
    """Returns texts with other lengths in the order and rows of these sources: their targets."""
    if isinstance(sources, Rows):
        return _in_rows(sources.texts, lengths, sources.starts // sources.width)
    mine = lengths[sources.texts]
    return Arrangement(sources.texts, mine, mine)


@dataclass(frozen=True)
class Naive:
    def lay(self, lengths: Array, places: Places | None = None) -> list[Arrangement]:
        return [_padded(np.arange(len(lengths)), lengths)]


@dataclass(frozen=True)
class Turbo:
    cost: GroupCost  # seconds by number and length of texts

    def lay(self, lengths: Array, places: Places | None = None) -> list[Arrangement]:
        order = end_to_end(lengths).texts
        return [_padded(group, lengths) for group in np.split(order, cheapest_cuts(lengths[order], self.cost))]


@dataclass(frozen=True)
class Concat:
    """`rows` (B) rows of `length` (L) tokens in a tensor. Longer texts go into a tensor of their own, without padding."""

    rows: int = 64
    length: int = 512

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or value < (name != "slot"):
                raise InvalidInput(f"packing option {name}={value} is not a whole number above 0: give 1 or more")

    def lay(self, lengths: Array, places: Places | None = None) -> list[Arrangement]:
        return _boxed(lengths, places and places.row, self.rows, self.length, self.length)


@dataclass(frozen=True)
class Slotted(Concat):
    """As `concat`, with each row cut into slots of `slot` (z) tokens. 0: as long as the longest text that fits a row."""

    slot: int = 0

    def lay(self, lengths: Array, places: Places | None = None) -> list[Arrangement]:
        return _boxed(lengths, places and places.slot, self.rows, self.length, min(self.slot, self.length))


def naive(measure: Measure) -> Naive:
    return Naive()


def turbo(measure: Measure) -> Turbo:
    return Turbo(GroupCost.measured(measure))


def concat(measure: Measure, **options: int) -> Concat:
    return Concat(**options)


def slotted(measure: Measure, **options: int) -> Slotted:
    return Slotted(**options)


def _padded(texts: Array, lengths: Array) -> Arrangement:
    mine = lengths[texts]
    width = int(mine.max())
    return Rows(texts, mine, np.full(len(texts), width), width)


def _boxed(lengths: Array, box: Array | None, rows: int, length: int, slot: int) -> list[Arrangement]:
    """Puts each text into its box, with `rows` rows of boxes in a tensor. Texts outside get one without padding.

    `box`: the policy's choice. If it has made none, or one of its boxes is too long, boxes are filled here. `slot`: the length
    of a box; 0: as long as the longest text that fits a row, or as the fullest box of the policy.
    """
    order = end_to_end(lengths).texts
    if box is None or _filled(lengths, box).max(initial=0) > (slot or length):
        slot = slot or int(lengths[lengths <= length].max(initial=1))
        box = np.empty(len(lengths), dtype=np.int64)
        box[order] = first_fit(lengths[order], slot, len(lengths))  # longest first: at most 11/9 of the fewest boxes are taken
    boxes = rows * (length // (slot or int(_filled(lengths, box).max(initial=1))))
    outside, order = order[box[order] == OUTSIDE], order[box[order] != OUTSIDE]
    arrangements: list[Arrangement] = [Arrangement(outside, lengths[outside], lengths[outside])] if len(outside) else []
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
    return Rows(texts, lengths[texts], rooms, width)


def _filled(lengths: Array, box: Array) -> Array:
    """Returns the tokens in each box."""
    inside = box != OUTSIDE
    _, of = np.unique(box[inside], return_inverse=True)
    return np.bincount(of, lengths[inside]).astype(np.int64)


@dataclass(frozen=True)
class GroupCost:
    """Seconds of a padded group: of its call, of each token and of each score, fitted to measured groups.

    If only padded tokens counted, one group for each length would be best. The cost of a call makes larger groups better.
    """

    call: float
    token: float
    score: float

    @classmethod
    def measured(cls, measure: Measure) -> GroupCost:
        shapes = list(product(COUNTS, WIDTHS))
        seconds = np.array([measure(count, width) for count, width in shapes])
        terms = np.array([(1, count * width, count * width**2) for count, width in shapes])
        fitted, *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(shapes)), rcond=None)  # errors relative to the time
        return cls(*np.maximum(fitted, 0).tolist())

    def of(self, count: Array, width: Array) -> Array:
        return self.call + count * width * (self.token + self.score * width)


def cheapest_cuts(lengths: Array, cost: GroupCost) -> Array:
    """Returns where to cut texts, given longest first, so that the groups together cost least."""
    least = np.zeros(len(lengths) + 1)  # lowest cost of the texts up to each
    cuts = [np.empty(0, dtype=np.int64)]  # of these texts
    for end in range(1, len(lengths) + 1):
        totals = least[:end] + cost.of(end - np.arange(end), lengths[:end])
        begin = int(totals.argmin())  # where the last group begins
        least[end] = totals[begin]
        cuts.append(np.append(cuts[begin], begin) if begin else cuts[0])
    return cuts[-1]


class RowAttention:
    """Attention of rows of equal width to rows of the texts that they read: their own, or their sources. Both have padding.

    A row has the same texts in both, and scores between texts are masked. `rooms` are the lengths of texts with the padding
    behind them, `read` and `read_rooms` the lengths and the rooms of what they read. Padding attends to its text, so that no
    row of scores is masked completely and becomes NaN. `causal`: a token attends to itself and to those before it.
    """

    def __init__(
        self,
        rooms: Array,
        read: Array,
        read_rooms: Array,
        rows: int,
        heads: int,
        device: torch.device,
        dtype: torch.dtype,
        causal: bool = False,
    ) -> None:
        self.rows, self.heads = rows, heads
        self.mask: Tensor | None = None
        self.causal = causal and len(read) == rows  # padding lies behind a row's only text: no mask is needed
        if self.causal:
            return
        within = np.arange(int(read_rooms.sum())) - np.repeat(np.cumsum(read_rooms) - read_rooms, read_rooms)
        sees = (within < np.repeat(read, read_rooms)).reshape(rows, 1, -1)
        if len(read) > rows:
            owner, its = (np.repeat(np.arange(len(one)), one).reshape(rows, -1) for one in (rooms, read_rooms))
            sees = sees & (owner[:, :, None] == its[:, None, :])
        sees = np.tril(sees) if causal else sees
        if not sees.all():
            hidden = sent(~sees[:, None], device)
            self.mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attended(query, key, value, self.rows, self.heads, self.mask, self.causal)


class CrossAttention:
    """Attention of each packed target to its source, in models that turn one text into another.

    `lengths` are the tokens of targets, `sources` those of their sources. There is no padding and no score between texts.
    """

    def __init__(self, lengths: Sequence[int], sources: Sequence[int], heads: int, causal: bool = False) -> None:
        """`causal`: a token attends to itself and to those before it."""
        self.heads, self.causal = heads, causal
        self.runs = [(*both, sum(1 for _ in run)) for both, run in groupby(zip(lengths, sources, strict=True))]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries = query.split_with_sizes([length * count for length, _, count in self.runs])
        keys, values = (x.split_with_sizes([source * count for _, source, count in self.runs]) for x in (key, value))
        parts = zip(queries, keys, values, self.runs, strict=True)
        return torch.cat([_attended(q, k, v, count, self.heads, None, self.causal) for q, k, v, (_, _, count) in parts])


def _attended(query: Tensor, key: Tensor, value: Tensor, rows: int, heads: int, mask: Tensor | None, causal: bool) -> Tensor:
    """Computes attention inside each of so many rows of equal length."""
    head = query.shape[1] // heads
    grouped = key.shape[1] < query.shape[1]
    query, key, value = (heads_of(x, rows, head) for x in (query, key, value))
    return flattened(scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=grouped))
