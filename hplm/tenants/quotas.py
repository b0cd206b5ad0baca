"""Quotas: how many requests, texts and tokens a second a tenant may send, and how many requests it may have in flight.

Each of the three rates has a bucket that fills with time and holds what may come at once. A request is accepted while every
bucket holds at least one, and then takes all that it costs: a bucket may fall below zero, and later requests wait until it has
recovered. So nothing is tokenised to find out that it is refused, no request is too large for its bucket for ever, and in the
long run the rate holds.

Behind a router a tenant may have several homes, replicas that share its quotas. Each grants an equal part of every one.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hplm.errors import InvalidInput, Quota
from hplm.tenants.snapshot import LIMITS, Tenant

LARGEST_LIMIT = 10**12  # requests, texts, tokens, or microseconds
WHOLE = ("in_flight", "homes", "deadline_us")  # limits that are whole numbers
RETRY_IN_FLIGHT_S = 0.1
_CHECKED = 2  # accounts that each request checks for removal: more than the one that it may add, so that no unused one stays


@dataclass
class _Bucket:
    rate: float
    size: float
    level: float
    filled_at: float

    def fill(self, now: float) -> None:
        self.level = min(self.size, self.level + max(0.0, now - self.filled_at) * self.rate)
        self.filled_at = now

    @property
    def wait(self) -> float:
        """The seconds until it holds at least one."""
        return (1 - self.level) / self.rate


_Account = dict[str, _Bucket]  # a tenant's buckets, by the unit of each of its rates


class Quotas:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: OrderedDict[int, _Account] = OrderedDict()  # by uid; the first is checked next
        self._in_flight: dict[int, int] = {}  # requests by uid, of tenants that have any
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Returns the number of tenants of whom something is known."""
        return len(self._accounts.keys() | self._in_flight.keys())

    def take(self, tenant: Tenant, texts: int, tokens: int) -> None:
        """Counts a request with all that it costs, and as in flight, or raises Quota. It must be given back once."""
        with self._lock:
            in_flight = self._in_flight.get(tenant.uid, 0)
            if tenant.in_flight and in_flight >= (most := max(1, tenant.in_flight // tenant.homes)):
                raise Quota(
                    f"tenant {tenant.id!r} has reached its limit of {most} requests in flight{_part(tenant)}: "
                    f"retry after {RETRY_IN_FLIGHT_S:g} s"
                )
            self._charge(tenant, least=1, requests=1, texts=texts, tokens=tokens)
            self._in_flight[tenant.uid] = in_flight + 1

    def spend(self, tenant: Tenant) -> None:
        """Counts a request whose cost is not known yet, or raises Quota. For callers that do not see its end."""
        self._charge(tenant, least=1, requests=1)

    def check(self, tenant: Tenant) -> None:
        """Raises Quota if the tenant is in debt. For requests that were counted and waited while others were charged."""
        self._charge(tenant, least=0)

    def charge(self, tenant: Tenant, texts: int, tokens: int) -> None:
        """Adds the rest of the cost of a request that was counted with `spend`."""
        self._charge(tenant, least=-math.inf, texts=texts, tokens=tokens)

    def give_back(self, tenant: Tenant) -> None:
        with self._lock:
            left = self._in_flight.pop(tenant.uid) - 1
            if left:
                self._in_flight[tenant.uid] = left

    def _charge(self, tenant: Tenant, least: float, requests: int = 0, texts: int = 0, tokens: int = 0) -> None:
        """Raises Quota if a bucket holds less, else takes the cost. The tenant's settings may be other ones than before."""
        if not (tenant.rate or tenant.texts_rate or tenant.tokens_rate):
            return
        with self._lock:
            now = self._clock()
            self._forget(now)
            account = self._accounts.setdefault(tenant.uid, {})
            _follow(account, tenant, now)
            waits = {unit: bucket.wait for unit, bucket in account.items() if bucket.level < least}
            if waits:
                unit = max(waits, key=waits.__getitem__)
                raise Quota(
                    f"tenant {tenant.id!r} has reached its limit of {account[unit].rate:,.12g} {unit} a second"
                    f"{_part(tenant)}: retry after {math.ceil(waits[unit] * 1000) / 1000:.3f} s"
                )
            for unit, cost in (("requests", requests), ("texts", texts), ("tokens", tokens)):
                if unit in account:
                    account[unit].level -= cost

    def _forget(self, now: float) -> None:
        for _ in range(min(_CHECKED, len(self._accounts))):
            uid, account = next(iter(self._accounts.items()))
            for bucket in account.values():
                bucket.fill(now)
            if all(bucket.level >= bucket.size for bucket in account.values()):  # as a new one
                del self._accounts[uid]
            else:
                self._accounts.move_to_end(uid)


def _follow(account: _Account, tenant: Tenant, now: float) -> None:
    """Fills the buckets, and changes them to the tenant's current rates."""
    limits = {
        "requests": (tenant.rate, tenant.burst or tenant.rate),
        "texts": (tenant.texts_rate, tenant.texts_rate),
        "tokens": (tenant.tokens_rate, tenant.tokens_rate),
    }
    for unit, (whole, at_once) in limits.items():
        if not whole:
            account.pop(unit, None)
            continue
        rate, size = whole / tenant.homes, max(1.0, at_once / tenant.homes)
        bucket = account.setdefault(unit, _Bucket(rate, size, size, now))
        bucket.fill(now)
        bucket.rate, bucket.size, bucket.level = rate, size, min(bucket.level, size)


def _part(tenant: Tenant) -> str:
    return f" on one of its {tenant.homes} homes" if tenant.homes > 1 else ""


def check_limits(limits: Mapping[str, float]) -> None:
    """Raises if these are not limits of a tenant."""
    if not limits or any(type(value) not in (int, float) for value in limits.values()):
        raise InvalidInput(f"give one or more of {', '.join(map(repr, (*LIMITS, 'homes')))}, each a number")
    if not all(0 <= value <= LARGEST_LIMIT for value in limits.values()):
        names = ", ".join(map(repr, limits))
        raise InvalidInput(f"a limit among {names} is out of range: give 0 to {LARGEST_LIMIT:,}; 0 removes a limit")
    if not limits.get("homes", 1):
        raise InvalidInput("'homes' is 0: give 1 or more, the replicas that share the tenant's quotas")
    fractions = [name for name in WHOLE if type(limits.get(name, 0)) is not int]
    if fractions:
        raise InvalidInput(f"{fractions[0]!r} is {limits[fractions[0]]!r}: give a whole number")
