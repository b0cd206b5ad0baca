"""Few cases in which all pairs of choices occur."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns cases, so that each value of each factor is beside each value of every other factor in at least one."""
    rng, cases = random.Random(0), []
    missing = {
        ((one, a), (other, b)): None for one, other in combinations(factors, 2) for a in factors[one] for b in factors[other]
    }
    while missing:
        first = dict(next(iter(missing)))
        drawn = [{name: first.get(name, rng.choice(values)) for name, values in factors.items()} for _ in range(50)]
        best = max(drawn, key=lambda case: sum(pair in missing for pair in combinations(case.items(), 2)))
        cases.append(best)
        for pair in combinations(best.items(), 2):
            missing.pop(pair, None)
    return cases
