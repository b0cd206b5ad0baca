"""The choice of a group for a request, as all simulators and a door before the groups make it."""

from __future__ import annotations

from collections.abc import Sequence


def shortest(queues: Sequence[float], groups: Sequence[int]) -> int:
    """Returns the group whose queue takes the least time, of equal ones the first.

    AlpaServe counts requests. Time is the same where all groups and requests are alike, and better where they are not.
    """
    return min(groups, key=queues.__getitem__)
