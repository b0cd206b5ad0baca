"""Max-min fair shares: a tenant that wants less than an equal share gets all it wants, and the others share the rest."""

from __future__ import annotations

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.columns import Columns

CHUNK = 1024  # texts per step: the first chunk nearly always fills a batch


def fair_share(demand: Array, room: float) -> float:
    """Returns the most that one tenant may have of the room; infinite if every tenant can have all it wants."""
    demand = np.sort(demand[demand > 0])
    levels = (room - np.cumsum(demand) + demand) / (len(demand) - np.arange(len(demand)))
    wants_more = demand > levels
    return float(levels[np.argmax(wants_more)]) if wants_more.any() else np.inf


def fair_first(columns: Columns, ordered: Array, room: int) -> Array:
    """Returns the same texts, with those within their tenant's fair share of the room first."""
    if not len(ordered):
        return ordered
    demand = np.bincount(columns.tenant, columns.tokens, minlength=columns.tenants)
    share = fair_share(demand, room)
    used = np.zeros(columns.tenants, np.int64)
    within = np.zeros(len(ordered), bool)
    end = 0
    for start in range(0, len(ordered), CHUNK):
        end = start + CHUNK
        chunk = ordered[start:end]
        tenant, tokens = columns.tenant[chunk], columns.tokens[chunk]
        by_tenant = np.argsort(tenant.astype(np.uint16), kind="stable")
        sums = np.cumsum(tokens[by_tenant])
        first = np.flatnonzero(np.diff(tenant[by_tenant], prepend=-1))
        whose = tenant[by_tenant][first]
        counts = np.diff(first, append=len(sums))
        sums += np.repeat(used[whose] - sums[first] + tokens[by_tenant][first], counts)
        fits = sums <= share
        fits[first[used[whose] == 0]] = True  # always within the share, or long texts would wait for ever
        within[start + by_tenant] = fits
        used[whose] = sums[first + counts - 1]
        if (used >= np.minimum(demand, share)).all():
            break
    seen, within = ordered[:end], within[:end]
    return np.concatenate([seen[within], seen[~within], ordered[end:]])
