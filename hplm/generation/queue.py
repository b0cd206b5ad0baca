"""The queue of sequences that wait to start, and the choice of those that start next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from math import inf

import numpy as np

from hplm.arrays import Array
from hplm.generation.request import Sequence
from hplm.generation.running import RunningSequences
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import Policy
from hplm.scheduling.queue import Queue


class SequenceQueue(Queue[Sequence]):
    """Each text is a sequence of its own. Who calls it holds the lock of the loop."""

    def __init__(self, policy: Policy, limits: Limits, running: RunningSequences) -> None:
        super().__init__(policy, limits)
        self.running = running

    def start(self, start_ns: int, take: Callable[[Sequence], bool]) -> list[Sequence]:
        """Returns the sequences that start now, until `take` refuses one.

        The tenants come first that have the least of what runs. Among their sequences the policy chooses.
        """
        started: list[Sequence] = []
        running, goes_on = self.running, True
        columns = self.columns
        if not len(columns) and not running.further:
            return started
        while goes_on and (capacity := running.capacity).texts > 0 and capacity.tokens > 0:
            shares = running.tenant_shares()
            further = min(running.further, key=lambda one: shares[one.tenant], default=None)
            share, indexes = self._least(shares)
            if further is not None and shares[further.tenant] <= share:
                goes_on = running.start_from(running.further, further, take)
                started += [further] if goes_on else []
                continue
            if not len(indexes) or (share and running.uncomputed >= running.step_tokens):
                break
            taken: list[int] = []
            for index in self.select(start_ns, capacity, not running.sequences, indexes).indexes.tolist():
                sequence = columns.text(index)
                if running.tenant_shares()[sequence.tenant] > share:
                    continue  # another one of its tenant has started
                if not (goes_on := take(sequence)):
                    break
                taken.append(index)
            goes_on &= bool(taken)
            started += self.remove(np.array(taken, dtype=np.int64))
        return started

    def expired(self, now_ns: int) -> list[Sequence]:
        """Removes and returns the sequences whose deadline has passed."""
        return self.late(now_ns, predicts=False)

    def cancelled(self) -> list[Sequence]:
        """Removes and returns the sequences whose requests were cancelled."""
        columns = self.columns
        indexes = [index for index in range(len(columns)) if columns.text(index).request.cancelled]
        return self.remove(np.array(indexes, dtype=np.int64))

    def next_expiry(self) -> int:
        """Returns when the next sequence expires, or NEVER."""
        return self.earliest(predicts=False)

    def _least(self, shares: Mapping[int, int]) -> tuple[float, Array]:
        """Returns the lowest share of all tenants with waiting sequences, and the indexes of their sequences."""
        columns = self.columns
        of_tenant = np.zeros(columns.tenants, dtype=np.int64)
        for tenant, share in shares.items():
            if (number := columns.number_of(tenant)) is not None:
                of_tenant[number] = share
        found = of_tenant[columns.tenant]
        share = found.min() if len(found) else inf
        return share, np.flatnonzero(found == share)

    def _admit(self, texts: Many[Sequence], now_ns: int) -> None:
        """Weighs the sequence by all choices of its request, as long as they are expected to be."""
        (sequence,) = texts
        sequence.tokens = sequence.request.sampling.n * sequence.in_the_end(self.running.share)
