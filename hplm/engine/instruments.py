"""What the upper half counts of its requests and batches."""

from __future__ import annotations

import time

from hplm.adapters.layout import Layout
from hplm.engine.staging import StagedBatch, Stager
from hplm.errors import Broken, HplmError
from hplm.metrics import names
from hplm.metrics.busiest import OTHERS, Busiest
from hplm.metrics.meter import Meter, Series
from hplm.scheduling.queue import Queue
from hplm.scheduling.scheduler import Batch
from hplm.tenants.snapshot import Tenant

BUSIEST = 20  # tenants with a series of their own
SECONDS_BETWEEN_CHOICES = 30.0


class Instruments:
    def __init__(self) -> None:
        self.meter = Meter()
        self._busiest = Busiest(BUSIEST)
        self._named: frozenset[str] | None = None  # None: whoever came first
        self._chosen_at = time.monotonic()
        self._seen: dict[Layout, tuple[int, int]] = {}  # hits and misses already counted

    def refused(self, tenant: Tenant, error: Exception) -> None:
        self._request(tenant, _reason(error))

    def answered(self, tenant: Tenant, answer: object, deadline_ns: int) -> None:
        if isinstance(answer, Exception):
            self._request(tenant, _reason(answer))
        elif not deadline_ns:
            self._request(tenant, "answered")
        else:
            self._request(tenant, "on_time" if time.monotonic_ns() <= deadline_ns else "late")

    def started(self, batch: Batch) -> None:
        now = time.monotonic_ns()
        self.meter.observe(names.WAIT_SECONDS, ((now - text.arrival_ns) / 1e9 for text in batch.texts))
        self.meter.observe(
            names.SLACK_SECONDS, ((text.deadline_ns - now) / 1e9 for text in batch.texts if text.deadline_ns)
        )

    def computed(self, staged: StagedBatch) -> None:
        tokens = sum(work.tokens for work in staged.works)
        self.meter.add(names.BATCHES)
        self.meter.add(names.BATCH_TEXTS, len(staged.works))
        self.meter.add(names.BATCH_TOKENS, tokens)
        self.meter.add(names.BATCH_PADDING, sum(len(sheet.positions) for sheet in staged.sheets) - tokens)
        for stage, seconds in staged.seconds.items():
            self.meter.add(names.STAGE_SECONDS, seconds, stage)

    def look(self, line: Queue, stager: Stager) -> None:
        """At what has a level, and at counts that others keep."""
        now = time.monotonic()
        if now - self._chosen_at > SECONDS_BETWEEN_CHOICES:
            self._named, self._chosen_at = self._busiest.choose(), now
        levels = line.levels()
        self.meter.set(names.WAITING_TEXTS, levels.texts)
        self.meter.set(names.WAITING_BYTES, levels.bytes)
        for term, nanoseconds in levels.cost.items():
            self.meter.set(names.COST_SECONDS, nanoseconds / 1e9, term)
        for layout, slots in stager.slots().items():
            seen = self._seen.get(layout, (0, 0))
            self._seen[layout] = hits, misses = slots.hits, slots.misses
            self.meter.add(names.SLOT_HITS, hits - seen[0], layout.name)
            self.meter.add(names.SLOT_MISSES, misses - seen[1], layout.name)
            self.meter.set(names.SLOTS_USED, slots.used, layout.name)

    def keeps(self, series: Series) -> bool:
        metric, labels = series
        return metric is not names.TENANT_REQUESTS or self._named is None or labels[0] in (OTHERS, *self._named)

    def _request(self, tenant: Tenant, outcome: str) -> None:
        self.meter.add(names.REQUESTS, 1, tenant.domain, outcome)
        self.meter.add(names.TENANT_REQUESTS, 1, self._busiest.name(tenant.id), outcome)


def _reason(error: Exception) -> str:
    return error.word if isinstance(error, HplmError) else Broken.word
