"""Quotas: how many requests a second a tenant may send, and how many it may have in flight."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hplm.errors import InvalidInput, Quota
from hplm.tenants.snapshot import Tenant

LARGEST_LIMIT = 10**12  # requests, or microseconds
RETRY_IN_FLIGHT_S = 0.1
_CHECKED = 2  # accounts that each request checks for removal: more than the one that it may add, so that no unused one stays


@dataclass
class _Account:
    """The state of a tenant's quotas: a bucket of requests that fills at `rate`, and the number of requests in flight."""

    level: float
    filled_at: float
    rate: float
    burst: float
    in_flight: int = 0

    def fill(self, now: float) -> None:
        self.level = min(self.burst, self.level + max(0.0, now - self.filled_at) * self.rate)
        self.filled_at = now

    def spend(self, tenant: Tenant) -> None:
        if not tenant.rate:
            return
        if self.level < 1:
            wait = math.ceil((1 - self.level) / tenant.rate * 1000) / 1000
            raise Quota(
                f"tenant {tenant.id!r} has reached its limit of {tenant.rate:g} requests a second: retry after {wait:.3f} s"
            )
        self.level -= 1

    def is_as_new(self, now: float) -> bool:
        self.fill(now)
        return self.in_flight == 0 and (self.rate == 0 or self.level >= self.burst)


class Quotas:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: OrderedDict[int, _Account] = OrderedDict()  # by uid; the first is checked next
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Returns the number of tenants with an account."""
        return len(self._accounts)

    def take(self, tenant: Tenant) -> None:
        """Counts a request as in flight, or raises Quota. Each counted request must be given back once."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            account = self._account(tenant, now)
            if tenant.in_flight and account.in_flight >= tenant.in_flight:
                raise Quota(
                    f"tenant {tenant.id!r} has reached its limit of {account.in_flight} requests in flight: "
                    f"retry after {RETRY_IN_FLIGHT_S:g} s"
                )
            account.spend(tenant)
            account.in_flight += 1

    def spend(self, tenant: Tenant) -> None:
        """Counts a request for the rate only, for callers that do not see its end. It is not given back."""
        if tenant.rate:
            with self._lock:
                now = self._clock()
                self._forget(now)
                self._account(tenant, now).spend(tenant)

    def give_back(self, tenant: Tenant) -> None:
        with self._lock:
            account = self._accounts[tenant.uid]
            account.in_flight -= 1
            if account.is_as_new(self._clock()):
                del self._accounts[tenant.uid]

    def _account(self, tenant: Tenant, now: float) -> _Account:
        """Returns the tenant's account, updated to its current settings, which may have changed since the last request."""
        burst = max(1.0, tenant.burst or tenant.rate)
        account = self._accounts.get(tenant.uid)
        if account is None:
            account = self._accounts[tenant.uid] = _Account(burst, now, tenant.rate, burst)
        if (account.rate, account.burst) != (tenant.rate, burst):
            account.fill(now)
            account.rate, account.burst = tenant.rate, burst
            account.level = min(account.level, burst) if tenant.rate else burst
        account.fill(now)
        return account

    def _forget(self, now: float) -> None:
        for _ in range(min(_CHECKED, len(self._accounts))):
            uid, account = next(iter(self._accounts.items()))
            if account.is_as_new(now):
                del self._accounts[uid]
            else:
                self._accounts.move_to_end(uid)


def check_limits(limits: Mapping[str, float]) -> None:
    """Raises if these are not limits of a tenant."""
    if not limits or any(type(value) not in (int, float) for value in limits.values()):
        raise InvalidInput("give 'rate', 'burst', 'in_flight' or 'deadline_us', each a number")
    if not all(0 <= value <= LARGEST_LIMIT for value in limits.values()):
        names = ", ".join(map(repr, limits))
        raise InvalidInput(f"a limit among {names} is out of range: give 0 to {LARGEST_LIMIT:,}; 0 removes a limit")
    if any(type(limits.get(name, 0)) is not int for name in ("in_flight", "deadline_us")):
        raise InvalidInput("'in_flight' or 'deadline_us' is not a whole number: give whole numbers")
