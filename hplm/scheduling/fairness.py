"""Fair shares of tenants, by the work that each has had: its virtual time, as in start-time fair queueing.

Shares are max-min fair: a tenant that wants less than an equal share gets all it wants, and the others share the rest. A text
counts with all its work when it is served. So tenants get equal work also where one text fills a batch.
"""

from __future__ import annotations

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.columns import Columns

AHEAD = 2  # batches of work that a tenant may have had more than another one before it comes after it


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


def served_before(columns: Columns, ordered: Array) -> Array:
    """Returns for each text the tokens of those of its tenant that come before it in this order."""
    numbers = columns.tenant[ordered]
    short = numbers.astype(np.uint16) if columns.tenants <= 1 << 16 else numbers  # numpy sorts 16-bit numbers fastest
    by_tenant = np.argsort(short, kind="stable")
    tokens = columns.tokens[ordered[by_tenant]]
    before = np.cumsum(tokens) - tokens
    first = np.flatnonzero(np.diff(numbers[by_tenant], prepend=-1))
    before -= np.repeat(before[first], np.diff(first, append=len(before)))
    found = np.empty(len(ordered), np.int64)
    found[by_tenant] = before
    return found


def fair_first(columns: Columns, ordered: Array, room: int) -> Array:
    """Returns the same texts, with those within their tenant's fair share of the room first.

    The first text of a tenant is within its share: it may be longer. But a tenant that is clearly ahead of another one comes
    after it. Not at once: otherwise tenants would take turns text by text, whatever their deadlines. Texts that fill more than
    half of the room do so earlier, because they leave others none.
    """
    demand, before, tenant = columns.demand, served_before(columns, ordered), columns.tenant[ordered]
    tokens, lead = columns.tokens[ordered], columns.had - columns.had[demand > 0].min()
    ahead = lead // (AHEAD * room)
    fits = before + tokens <= fair_share(np.where(ahead > 0, 0, demand), room)
    is_first = (before == 0) & ((2 * tokens <= room) | (lead < room)[tenant])
    rank = 2 * ahead[tenant] + ~(fits | is_first)
    return ordered[np.argsort(rank, kind="stable")]


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
