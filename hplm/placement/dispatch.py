"""The choice of a group for a request: that with the shortest queue, as far as a simulator can see it.

Each simulator measures queues by its own means. The screen takes the time until a group's first stage is free. The full
simulator adds up the work of all texts that are in a group, each in its slowest stage, and does not see how much of a batch
is done already. The screen's batches have one line a unit, from which a group takes texts when it becomes idle.
"""

from __future__ import annotations

from collections.abc import Sequence


def shortest(queues: Sequence[float], groups: Sequence[int]) -> int:
    """Returns the group whose queue takes the least time, of equal ones the first.

    AlpaServe counts requests. Time is the same where all groups and requests are alike, and better where they are not.
    """
    return min(groups, key=queues.__getitem__)
