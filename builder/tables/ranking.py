"""The order in which tables take the n-grams of a corpus: each level by itself (`Window.levels`), the most frequent first.

`keep` is a share of the whole windows, which a lookup searches first (HMI 3.3). Shorter forms are taken beside them. They do
not compete with whole windows: a form occurs at least as often as the windows that shrink to it, but is searched only where
these have no row.

A branch takes the same share of each level; what it lacks, its parent has. A root takes four times the share of shorter forms,
because all domains fall back to them (research/findings/README.md says how well other shares explain an unread text).
"""

from __future__ import annotations

import numpy as np

from builder.tables.counts import Counts
from hplm.errors import InvalidInput

SHORTER_IN_ROOT = 4
BISECTIONS = 60  # until two shares are the same float


class Ranking:
    """A table with a larger `keep` has the keys of one with a smaller `keep`, and others after them."""

    def __init__(self, counts: Counts, root: bool) -> None:
        self._counts = counts
        self.root = root
        # The share of each level, in shares of the whole windows.
        self._factors = [SHORTER_IN_ROOT if root and level else 1 for level in range(len(counts.levels))]

    def number(self, keep: float) -> int:
        """Returns how many keys a table takes."""
        check_keep(keep)
        return sum(self.taken(keep))

    def keep_for(self, number: int) -> float:
        """Returns the largest `keep` of a table with at most so many n-grams."""
        if self.size(1.0) <= number:
            return 1.0
        least, most = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (least + most) / 2
            least, most = (middle, most) if self.size(middle) <= number else (least, middle)
        return least

    def size(self, keep: float) -> int:
        """Returns the n-grams of a table. A root has all single tokens whatever it takes."""
        taken = self.taken(keep)
        return sum(taken[:-1]) + self._counts.space.vocabulary if self.root else sum(taken)

    def keys(self, number: int) -> np.ndarray:
        """Returns the first `number` keys. All are in memory at once, as the table's are too: some 100 bytes each.

        Key i of a level with n keys is at (i + 1/2) / (n * factor) of the order. Of two keys at one place, that of the deeper
        level is first.
        """
        levels = [(level, min(rows, number)) for level, rows in enumerate(self._counts.levels)][::-1]
        places = [(np.arange(most) + 0.5) / (self._counts.levels[level] * self._factors[level]) for level, most in levels]
        keys = [self._counts.most_frequent(level, most) for level, most in levels]
        return np.concatenate(keys)[np.argsort(np.concatenate(places), kind="stable")[:number]]

    def taken(self, keep: float) -> list[int]:
        """Returns how many keys of each level a table takes."""
        levels = zip(self._counts.levels, self._factors, strict=True)
        return [min(rows, int(keep * factor * rows + 0.5)) for rows, factor in levels]


def check_keep(keep: float | None) -> None:
    """Refuses what is no share. None: the default of a command."""
    if keep is not None and not 0.0 <= keep <= 1.0:
        raise InvalidInput(f"keep {keep}: give a share between 0 and 1")
