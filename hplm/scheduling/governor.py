"""Chooses by load how dear answers are: the rung that a request gets.

A tenant has rungs, the dearest first, with the cost of each. The governor has one rung for all tenants that ask for more than
their fair share. It goes down when a crowd waits, and up when it is calm and the load would stay below a bound. Tenants within
their fair share have the dearest rung, whatever the others do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import exp

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.columns import Columns, Numbers
from hplm.scheduling.cost import CostModel
from hplm.scheduling.fairness import fair_share

BOUND = 0.7  # share of the engine that all tenants may use after a step up
HORIZON_NS = 500_000_000  # the load is what has come in such a time
HORIZON_BATCHES = 16  # or in so many full batches, if these take longer
CALM = 3  # horizons without a crowd before a step up: then the load is known to 5 %
LOOKS = 2  # crowded batches in a row before a step down: the next batch clears a shorter burst
MOST_PATIENCE = 32  # times CALM, after steps up that did not last
LEARNING = 0.1  # rate of the running mean of what a full batch holds
TICKS = 16  # in a horizon: how often loads are aged
LEAST = 1.0  # tokens: a tenant with less load is forgotten
LONGEST = 300.0  # of an idle time, in two horizons: a load of 0 would never be forgotten
FIRST_ROOM = 64


class Governor:
    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.rung = 0  # of tenants beyond their fair share, in ladders that are long enough
        self._full: Array | None = None  # 1 and the mean tokens, texts, adapters of batches that left a crowd waiting
        self._horizon_ns = float(HORIZON_NS)
        self._capacity = np.inf  # tokens that full batches compute in a horizon
        self._numbers = Numbers()  # of tenants that are not forgotten. They index the arrays below.
        # Tokens that came in the last horizon, at the cost of each rung; beyond a tenant's cheapest one at its cost.
        self._loads = np.zeros((FIRST_ROOM, 1))
        self._waits = np.zeros(FIRST_ROOM)  # tokens that wait
        self._beyond = np.zeros(FIRST_ROOM, bool)  # whether the tenant asks for more than its fair share
        self._share = 0.0  # the fair share, in tokens of a horizon
        self._aged_ns = 0
        self._calm_since_ns = 0
        self._crowded = 0  # looks in a row
        self._raised_ns: int | None = None  # the time of the last step, if it was up
        self._patience = 1  # times CALM, before the next step up

    def __len__(self) -> int:
        """Returns a bound: no more tenants are remembered."""
        return len(self._numbers)

    def rung_for(self, tenant: Hashable, tokens: int, costs: Sequence[float], now_ns: int) -> int:
        """Counts a request as load, and returns its rung.

        `costs`: of each rung, the dearest first: how many passes through all layers a token is expected to take.
        """
        self._age(now_ns)
        number = self._number(tenant, len(costs))
        if self._loads.shape[1] == 1:
            self._loads[number, 0] += tokens * costs[0]
            return 0
        self._loads[number, : len(costs)] += tokens * np.array(costs)
        self._loads[number, len(costs) :] += tokens * costs[-1]
        if not self.rung:
            return 0
        only = slice(number, number + 1)
        self._beyond[only] = self._asks_for_more(only)
        return min(self.rung, len(costs) - 1) if self._beyond[number] else 0

    def chosen(self, full: tuple[int, int, float] | None, line: Columns, crowded: bool, now_ns: int) -> None:
        """Looks at the line after a batch has left it.

        `crowded`: more texts waited, or were not served, than a batch holds. `full`: the tokens, texts and adapters of the
        batch, if it left texts waiting.
        """
        if crowded and full:
            held = np.array([1, *full], float)
            self._full = held if self._full is None else self._full + LEARNING * (held - self._full)
        if self._full is not None:
            batch_ns = max(1.0, float(self._cost.terms @ self._full) * self._cost.slowest)
            self._horizon_ns = max(HORIZON_NS, HORIZON_BATCHES * batch_ns)
            self._capacity = float(self._full[1]) * self._horizon_ns / batch_ns
        if self._loads.shape[1] == 1:  # no tenant has a choice
            return
        if crowded or self.rung:
            self._count(line)
        elif self._crowded:
            self._waits[:] = 0
        self._crowded = self._crowded + 1 if crowded else 0
        if crowded:
            self._calm_since_ns = now_ns
        if self._crowded >= LOOKS:
            self._crowded = 0
            self._step_down(now_ns)
        self._age(now_ns)

    @property
    def _all(self) -> slice:
        return slice(0, len(self._numbers))

    def _number(self, tenant: Hashable, rungs: int) -> int:
        """Returns a tenant's number. The arrays have room for it, and for so many rungs."""
        number = self._numbers.number_of(tenant)
        if number is None:
            number = self._numbers.take(tenant)
            if number == len(self._loads):
                self._loads, self._waits, self._beyond = (
                    np.concatenate([column, np.zeros_like(column)]) for column in (self._loads, self._waits, self._beyond)
                )
        if rungs > self._loads.shape[1]:
            self._loads = np.pad(self._loads, ((0, 0), (0, rungs - self._loads.shape[1])), mode="edge")
        return number

    def _age(self, now_ns: int) -> None:
        """Steps up if it is time, lets loads fade, and forgets tenants whose load has."""
        passed = now_ns - self._aged_ns
        if passed < self._horizon_ns / TICKS:
            return
        self._aged_ns = now_ns
        loads, fades = self._loads[self._all], exp(-min(passed / 2 / self._horizon_ns, LONGEST))
        loads *= fades  # the other half comes after the look: what has come since the last one is half as old, on average
        if self.rung:
            self._share = self._fair_share()
            if passed > CALM * self._horizon_ns:  # nothing came, and nothing was chosen
                self._go_to(0, now_ns)
            elif now_ns - self._calm_since_ns >= self._calm_ns and self._use(self.rung - 1) < BOUND:
                self._raised_ns = now_ns
                self._go_to(self.rung - 1, now_ns)
        loads *= fades
        idle = np.flatnonzero((loads[:, 0] > 0) & (loads[:, 0] < LEAST) & (self._waits[self._all] == 0))
        if len(idle):
            self._loads[idle], self._beyond[idle] = 0, False
            self._numbers.give_back(idle.tolist())

    def _count(self, line: Columns) -> None:
        """Counts the waiting tokens of each tenant. They may be the rest of a load that has faded."""
        self._waits[:] = 0
        for tenant, tokens in line.by_tenant():
            mine = self._numbers.number_of(tenant)
            if mine is not None:
                self._waits[mine] = tokens

    def _wanted(self, numbers: slice) -> Array:
        return np.maximum(self._loads[numbers, 0], self._waits[numbers])

    def _fair_share(self) -> float:
        """Returns the most that a tenant may ask for and still have the dearest rung.

        The tenants share the engine. A crowd may also come from a smaller load, in a burst. So they share no more than a part
        of what they ask for: the tenants that ask for most are always beyond their share.
        """
        wanted = self._wanted(self._all)
        share = fair_share(wanted, min(self._capacity, BOUND * float(wanted.sum())))
        return share if np.isfinite(share) else 0.0

    def _asks_for_more(self, numbers: slice) -> Array:
        """Whether each tenant asks for more than its fair share. To be within it again, it must ask for clearly less."""
        return self._wanted(numbers) > self._share * np.where(self._beyond[numbers], BOUND, 1.0)

    def _step_down(self, now_ns: int) -> None:
        self._share = self._fair_share()
        beyond = self._beyond[self._all] = self._asks_for_more(self._all)
        theirs = self._loads[self._all][beyond]
        if not (theirs[:, self.rung + 1 :].min(axis=1, initial=np.inf) < theirs[:, self.rung]).any():
            return  # no tenant beyond its share has a cheaper rung
        if self._raised_ns is not None:
            lasted = now_ns - self._raised_ns >= self._calm_ns
            self._patience = 1 if lasted else min(2 * self._patience, MOST_PATIENCE)
            self._raised_ns = None
        self._go_to(self.rung + 1, now_ns)

    @property
    def _calm_ns(self) -> float:
        """The time that it must be calm before a step up."""
        return self._patience * CALM * self._horizon_ns

    def _use(self, rung: int) -> float:
        """Returns the share of the engine that the load would take, with this rung for the tenants beyond their share."""
        loads = self._loads[self._all]
        return float(np.where(self._beyond[self._all], loads[:, rung], loads[:, 0]).sum()) / self._capacity

    def _go_to(self, rung: int, now_ns: int) -> None:
        self.rung = rung
        self._calm_since_ns = now_ns
        if not rung:
            self._beyond[:] = False
            self._waits[:] = 0
