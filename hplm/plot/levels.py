"""Counts for each domain where lookups find their rows: in its own table, further up the chain, or by a shorter n-gram."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np

from hplm.arrays import Array
from hplm.plot.forest import Chain, Hits


def count_levels(chain: Chain, found: Array) -> Counter[str]:
    """Adds up the counts by the names of places, of which every one is present, in the order in which a lookup tries them.

    Whole windows are named `domain`, `parent` and `root`, shorter ones `2-gram` and `1-gram`. At the end of a text a window
    has fewer tokens than its level's name says.
    """
    whole = ["domain", *["parent"] * (len(chain.links) - 2), "root"] if len(chain.links) > 1 else ["root"]
    tokens = chain.space.window.levels().sum(1).tolist()
    names = whole + [f"{count}-gram" for count in tokens[1:] for _ in chain.links]
    counts: Counter[str] = Counter(dict.fromkeys(names, 0))
    for name, count in zip(names, found.tolist(), strict=True):
        counts[name] += count
    return counts


def ends(chain: Chain, hits: Hits) -> Array:
    """Returns how many lookups ended at each place, in the order in which a lookup tries them."""
    return np.bincount(hits.tries, minlength=len(chain.space.masks) * len(chain.links))


class Tally:
    """Adds up the counts of several threads until the publisher takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, Chain], Array] = {}

    def add(self, domain: str, chain: Chain, hits: Hits) -> None:
        found = ends(chain, hits)
        with self._lock:
            known = self._found.get((domain, chain))
            self._found[domain, chain] = found if known is None else known + found

    def take(self) -> Counter[tuple[str, str]]:
        """Returns the counts by (domain, level) since the last call."""
        with self._lock:
            taken, self._found = self._found, {}
        counts: Counter[tuple[str, str]] = Counter()
        for (domain, chain), found in taken.items():
            counts.update({(domain, name): count for name, count in count_levels(chain, found).items()})
        return counts
