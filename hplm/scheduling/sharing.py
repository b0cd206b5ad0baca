"""Max-min fair shares: a tenant that wants less than an equal share gets all it wants, and the others share the rest."""

from __future__ import annotations

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.columns import Columns


def fair_share(demand: Array, room: float) -> float:
    """Returns the most that one tenant may have of the room; infinite if every tenant can have all it wants."""
    wants_more, room_left = demand[demand > 0], room
    while len(wants_more):
        level = room_left / len(wants_more)
        satisfied = wants_more <= level
        if not satisfied.any():
            return level
        room_left -= int(wants_more[satisfied].sum())
        wants_more = wants_more[~satisfied]
    return np.inf


def beyond_share(tenant: Array, batch: Array, tokens: Array, allowed: Array) -> Array:
    """Returns for each batch the tokens due with it or earlier that tenants have beyond what each is allowed until then.

    `allowed` never falls from batch to batch. So only tenants with more than its first value are counted batch by batch.
    """
    has_more = np.bincount(tenant, tokens) > allowed[0]
    number = np.cumsum(has_more) - 1
    theirs = has_more[tenant]
    cells = number[tenant[theirs]] * len(allowed) + batch[theirs]
    counted = np.bincount(cells, tokens[theirs], minlength=np.count_nonzero(has_more) * len(allowed))
    return np.maximum(counted.reshape(-1, len(allowed)).cumsum(axis=1) - allowed, 0).sum(axis=0)


def fair_first(columns: Columns, ordered: Array, room: int) -> Array:
    """Returns the same texts, with those within their tenant's fair share of the room first."""
    share = fair_share(columns.demand, room)
    numbers = columns.tenant[ordered]
    short = numbers.astype(np.uint16) if columns.tenants <= 1 << 16 else numbers  # numpy sorts 16-bit numbers fastest
    by_tenant = np.argsort(short, kind="stable")
    tenant, tokens = numbers[by_tenant], columns.tokens[ordered[by_tenant]]
    sums = np.cumsum(tokens)
    first = np.flatnonzero(np.diff(tenant, prepend=-1))
    sums -= np.repeat(sums[first] - tokens[first], np.diff(first, append=len(sums)))
    fits = sums <= share
    fits[first] = True  # always within the share, or long texts would wait for ever
    within = np.empty(len(ordered), bool)
    within[by_tenant] = fits
    return np.concatenate([ordered[within], ordered[~within]])
