"""Lays the texts of a batch in tensors: end to end, unless a packing of another package is chosen (`hplm.packings`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from hplm.arrays import Array, ranges
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention
from hplm.model.layer import Attend
from hplm.model.tensors import LEAST_STEP, rounded_up
from hplm.registered import PACKINGS, made
from hplm.scheduling.selection import Places

PACKED = "packed"
WORTH = 256  # tokens for each thread; with fewer, divided products are faster (MiniLM)
UNEVEN = 1.25  # times a thread's part of the tokens that the largest one may be


@dataclass
class Arrangement:
    """One tensor: texts end to end, each followed by its padding. A text attends to itself only."""

    texts: Array  # indexes of texts of the batch, in their order in the tensor
    lengths: Array  # tokens of each text
    rooms: Array  # tokens of each text with its padding
    few_shapes: bool = field(default=False, kw_only=True)  # whether attention should have few shapes (`PackedAttention`)
    rows: int = field(init=False)
    starts: Array = field(init=False)

    def __post_init__(self) -> None:
        ends = self.rooms.cumsum()
        self.rows, self.starts = int(ends[-1]), ends - self.rooms

    @property
    def tokens(self) -> Array:
        """The places of all tokens, without padding."""
        return ranges(self.starts, self.lengths)

    @property
    def offsets(self) -> Array:
        """The place of each token in its text."""
        lengths = self.lengths
        if len(lengths) == 1:
            return np.arange(int(lengths[0]))
        starts = self.starts if self.rooms is lengths else np.cumsum(lengths) - lengths
        return np.arange(int(starts[-1] + lengths[-1])) - np.repeat(starts, lengths)

    def by_row(self, values: Array) -> Array:
        """Returns what tokens have by the rows of the tensor, with zeros where there is padding."""
        if len(values) == self.rows:
            return values
        found = np.zeros(self.rows, dtype=np.int64)
        found[self.tokens] = values
        return found

    @property
    def is_scattered(self) -> bool:
        """Whether there is padding elsewhere than behind the last text."""
        return self.rooms is not self.lengths and bool((self.rooms[:-1] != self.lengths[:-1]).any())

    def rounded_up(self) -> Arrangement:
        """Returns it with rows behind the last text, so that there are few different sizes."""
        more = rounded_up(self.rows) - self.rows
        return replace(self, rooms=np.append(self.rooms[:-1], self.rooms[-1] + more)) if more else self

    def attention(self, heads: int, device: torch.device, dtype: torch.dtype) -> Attend:
        """Returns attention inside texts. Only the last one has padding."""
        lengths, padding = self.lengths, int(self.rooms[-1] - self.lengths[-1])
        if padding:  # rows that see only each other, like texts
            behind, rest = (0, padding) if self.few_shapes else divmod(padding, LEAST_STEP)
            lengths = np.array([*lengths.tolist(), *[LEAST_STEP] * behind, *[rest] * (rest > 0)])
        return PackedAttention(lengths, heads, device, few_shapes=self.few_shapes)


class Packing(Protocol):
    def lay(self, lengths: Array, places: Places | None = None) -> list[Arrangement]:
        """Returns arrangements that contain every text once. `places` are those that the policy has chosen."""
        ...


def end_to_end(lengths: Array, owners: Array | None = None, few_shapes: bool = False) -> Arrangement:
    """Returns texts without padding: those of one owner are neighbours, so that adapters apply to rows where they lie.

    Texts of equal length are neighbours too, which makes attention on a CPU faster.
    """
    order = np.lexsort((-lengths,) if owners is None else (-lengths, owners))
    lengths = lengths[order]
    return Arrangement(order, lengths, lengths, few_shapes=few_shapes)


def divided(whole: Arrangement, threads: int) -> list[Arrangement]:
    """Returns texts without padding in a tensor for each thread, with about as many tokens. Few tokens stay in one."""
    lengths, tokens = whole.lengths, whole.rows
    if threads == 1 or tokens < threads * WORTH:
        return [whole]
    middles = lengths.cumsum() - lengths / 2
    of_texts = (middles * threads / tokens).astype(np.int64)  # the threads
    loads = np.bincount(of_texts, lengths, threads)
    if not loads.min() or loads.max() > UNEVEN * tokens / threads:
        return [whole]
    cuts = np.searchsorted(of_texts, np.arange(1, threads))
    own = zip(np.split(whole.texts, cuts), np.split(lengths, cuts), strict=True)
    return [Arrangement(texts, lengths, lengths, few_shapes=whole.few_shapes) for texts, lengths in own]


def read_packing(given: str, measure: Callable[[int, int], float], near: int | None = None) -> Packing | None:
    """Reads a model's parameter `packing`. None: texts lie end to end.

    `measure(texts, tokens)` returns the seconds that texts of so many tokens take. `near`: of the backbone.
    """
    if given == PACKED:
        return None
    if near is not None:
        raise InvalidInput(
            f"packing {given!r} cannot attend to the {near} nearest tokens alone, as this backbone does: write {PACKED}"
        )
    if given.startswith(f"{PACKED}:"):
        raise InvalidInput(f"packing {given!r} has options, but {PACKED} takes none: write {PACKED}")
    return made(PACKINGS, given, "packing", {PACKED: ""}, measure)
