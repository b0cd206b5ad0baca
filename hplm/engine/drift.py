"""Drift: tenants whose texts go on clearly more or less often than when their plans were profiled."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from math import sqrt

from hplm.engine.request import Text
from hplm.levels.plan import Plan
from hplm.tenants.snapshot import Tenant

log = logging.getLogger(__name__)
DECISIONS = 500  # after so many, a share is compared
ERRORS = 4.0  # standard errors that the share may be off
SLACK = 0.05  # and so much besides: a profile has its own errors, and no two hours have the same texts
MOST = 4096  # steps that are watched at a time; of more, the oldest counts are forgotten
REMEMBERED = 24 * 3600.0  # seconds without another comparison after which a drift is forgotten: its tenant may be gone

Key = tuple[int, int, int, int]  # uid and version of the tenant, the plan's place in its ladder, or OF_LINK, the step
OF_LINK = -1


class Drift:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[Key, list[int]] = OrderedDict()  # decisions, and how many of them to go on
        self._off: dict[Key, float] = {}  # steps that have drifted, and when that was last seen

    def __len__(self) -> int:
        """Returns how many steps of plans have drifted."""
        with self._lock:
            since = time.monotonic() - REMEMBERED
            self._off = {key: seen for key, seen in self._off.items() if seen > since}
            return len(self._off)

    def count(self, answered: Iterable[Text], going_on: Iterable[Text], leaving: Iterable[Text] = ()) -> None:
        """Counts decisions, but not about texts that come by a link.

        Texts that go on stand at their next step already, but for those that leave the backbone.
        """
        with self._lock:
            for text in answered:
                self._add(text, text.step, 0)
            for text in going_on:
                self._add(text, text.step - 1, 1)
            for text in leaving:
                self._add(text, text.step, 1)

    def _add(self, text: Text, step: int, goes_on: int) -> None:
        if text.request.is_by_link:
            return  # plans are profiled with all texts of a tenant, not with those that another backbone was not sure of
        tenant, plan = text.request.tenant, text.request.plan
        place = tenant.plans.index(plan) if plan in tenant.plans else OF_LINK
        key = tenant.uid, tenant.version, place, step
        counted = self._counts.setdefault(key, [0, 0])
        if len(self._counts) > MOST:
            self._counts.popitem(last=False)
        counted[0] += 1
        counted[1] += goes_on
        if counted[0] < DECISIONS:
            return
        del self._counts[key]
        self._compare(key, tenant, plan, counted[1] / counted[0])

    def _compare(self, key: Key, tenant: Tenant, plan: Plan, found: float) -> None:
        now, after = plan.steps[key[3]], plan.steps[key[3] + 1]
        # Texts in several windows come to the last step at once, so that nothing is decided about them.
        at_once = 1 - plan.steps[0].reached if after is plan.steps[-1] else 0.0
        expected = max(0.0, after.reached - at_once) / now.reached if now.reached else 1.0
        if abs(found - expected) <= SLACK + ERRORS * sqrt(max(expected * (1 - expected), 0.0) / DECISIONS):
            self._off.pop(key, None)
            return
        if key not in self._off:
            log.warning(
                "tenant %s: %.0f %% of its texts go on from level %d, but %.0f %% did when it was profiled; its texts have "
                "changed: build its levels with texts of today, and profile them again",
                tenant.id, 100 * found, now.level + 1, 100 * expected,
            )  # fmt: skip
        self._off[key] = time.monotonic()
