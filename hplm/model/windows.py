"""n-gram windows: the tokens that the lower stack sees together, and how a window that no table has is shortened.

`ABSENT` stands for positions beyond the ends of a text. Tokens are stored as id + 1, so that 0 means "no token" in any
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

ABSENT = 0
LONGEST = 5


@dataclass(frozen=True)
class Window:
    """n tokens around a token (of an encoder), or the token and the n - 1 before it (causal, of a decoder).

    An encoder's window stores a vector for each of its tokens, and a token sums the vectors of n windows. A decoder's window
    stores a vector for its last token only.
    """

    n: int
    causal: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.n <= LONGEST:
            raise InvalidInput(f"a window of {self.n} tokens is not possible: choose 1 to {LONGEST} tokens")

    @property
    def centre(self) -> int:
        """The position of the token that a window belongs to."""
        return self.n - 1 if self.causal else self.n // 2

    @property
    def stored(self) -> slice:
        """The positions whose vectors are stored."""
        return slice(self.centre, self.centre + 1) if self.causal else slice(0, self.n)

    @property
    def vectors(self) -> int:
        return self.stored.stop - self.stored.start

    def levels(self) -> Array:
        """Returns which positions each level of the fallback keeps, the whole window first: abc -> 0bc -> 0b0, causal -> 00c.

        The farthest token is dropped first, left before right, until only the window's own token is left.
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
        """Sums for each token its vectors in all windows: windows x vectors x d -> tokens x d.

        Token i is at position j of the window of token i + centre - j. Positions beyond a text's ends are absent and hold
        zeros, so a plain shift over the packed texts never mixes two texts.
        """
        from torch.nn.functional import pad  # here, because lookup starts without torch

        count, reach, first = len(vectors), self.n - 1, self.stored.start
        spaced = pad(vectors, (0, 0, 0, 0, reach, reach))
        total = vectors[:, self.centre - first]
        for position in range(first, self.stored.stop):
            if position != self.centre:
                start = reach + self.centre - position
                total = total + spaced[start : start + count, position - first]
        return total


TRIGRAMS = Window(3)
