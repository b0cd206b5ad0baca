"""n-gram windows: which tokens the lower stack sees together, and how a window shrinks when it is not in a table.

`ABSENT` stands where a text ends. Tokens are stored as id + 1, so that 0 is free to mean "no token" in any vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor, cat

from hplm.errors import InvalidInput

ABSENT = 0
LONGEST = 5


@dataclass(frozen=True)
class Window:
    """n tokens around a token (an encoder's), or the token and the n - 1 before it (causal: a decoder's).

    An encoder's window says something of each of its tokens, and a token gathers what n windows say of it; a decoder's window
    speaks of its last token alone.
    """

    n: int
    causal: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.n <= LONGEST:
            raise InvalidInput(f"window {self.n}: choose 1 to {LONGEST} tokens")

    @property
    def centre(self) -> int:
        """The position of the token that a window belongs to."""
        return self.n - 1 if self.causal else self.n // 2

    @property
    def stored(self) -> slice:
        """The positions that a vector is kept of."""
        return slice(self.centre, self.centre + 1) if self.causal else slice(0, self.n)

    @property
    def vectors(self) -> int:
        return self.stored.stop - self.stored.start

    def of(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The window of each token of texts that lie end to end: tokens x n, int64, as id + 1."""
        ends = np.cumsum(lengths)
        starts = np.repeat(ends - lengths, lengths)
        stops = np.repeat(ends, lengths)
        at = np.arange(len(tokens))[:, None] + np.arange(-self.centre, self.n - self.centre)
        inside = (at >= starts[:, None]) & (at < stops[:, None])
        return np.where(inside, tokens.astype(np.int64)[np.clip(at, 0, max(len(tokens) - 1, 0))] + 1, ABSENT)

    def levels(self) -> np.ndarray:
        """Which positions each level of the fallback keeps, the whole window first: for 3, abc -> 0bc -> 0b0; causal, -> 00c.

        The farthest token goes first, left before right, until the window's own is alone.
        """
        keep = np.ones(self.n, dtype=bool)
        levels = [keep.copy()]
        for distance in range(self.centre, 0, -1):
            for position in (self.centre - distance, self.centre + distance):
                if position < self.n:
                    keep[position] = False
                    levels.append(keep.copy())
        return np.stack(levels)

    def aggregate(self, vectors: Tensor) -> Tensor:
        """What all windows say of a token, summed: windows x vectors x d -> tokens x d.

        Token i stands at position j of the window of token i + centre - j. Positions beyond a text's end are absent there, and
        absent positions hold zeros, so a plain shift over the packed texts never mixes two of them.
        """
        total = vectors[:, self.centre - self.stored.start]
        for position in range(self.stored.start, self.stored.stop):
            shift = self.centre - position  # the window that holds token i at `position` is the one of token i + shift
            if shift == 0 or abs(shift) >= len(vectors):
                continue
            part = vectors[:, position - self.stored.start]
            pad = part.new_zeros(abs(shift), part.shape[1])
            total = total + (cat([part[shift:], pad]) if shift > 0 else cat([pad, part[:shift]]))
        return total


TRIGRAMS = Window(3)
