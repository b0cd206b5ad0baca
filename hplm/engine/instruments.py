"""Counts the batches of the upper half, and writes them and their requests to the journal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from hplm.adapters.layout import Layout
from hplm.engine.exits import Watch
from hplm.engine.journal import Journal
from hplm.engine.request import Answer, Request, Text
from hplm.engine.sheets import StagedBatch
from hplm.engine.staging import Stager
from hplm.errors import word_of
from hplm.metrics import names
from hplm.metrics.meter import Meter, Series


class Instruments:
    def __init__(self, journal: Journal) -> None:
        self.meter = Meter()
        self._journal = journal
        self._batches = 0
        self._seen: dict[Layout, tuple[int, int]] = {}  # hits and misses that are already counted

    def left(self, request: Request, answer: Answer) -> None:
        """Notes a request that was answered or refused. Called once for each request. The model process counts it."""
        self._journal.request(request, word_of(answer) if isinstance(answer, Exception) else "", time.monotonic_ns())

    def started(self, staged: StagedBatch) -> None:
        """Notes when a batch starts to compute."""
        self._batches += 1
        staged.number, started = self._batches, staged.batch.started_ns or 0
        for text in staged.texts:
            request = text.request
            request.started_ns = request.started_ns or started
            request.batch = staged.number

    def reached(self, texts: Iterable[Text]) -> None:
        """Notes when texts were computed, before their requests are answered."""
        now = time.monotonic_ns()
        for text in texts:
            text.request.computed_ns = now

    def computed(self, staged: StagedBatch) -> None:
        """Counts a computed batch. Its requests are answered."""
        texts, started, tokens = staged.batch.texts, staged.batch.started_ns or 0, staged.tokens
        self.meter.observe(names.WAIT_SECONDS, [(started - text.arrival_ns) / 1e9 for text in texts])
        if slack := [(text.deadline_ns - started) / 1e9 for text in texts if text.deadline_ns]:
            self.meter.observe(names.SLACK_SECONDS, slack)
        counts: dict[Series, float] = {
            (names.BATCHES, ()): 1,
            (names.BATCH_TEXTS, ()): len(staged.texts),
            (names.BATCH_TOKENS, ()): tokens,
            (names.BATCH_PADDING, ()): sum([sheet.rows for sheet in staged.sheets]) - tokens,
        }
        for stage, (start, end) in staged.stages.items():
            counts[names.STAGE_SECONDS, (stage,)] = (end - start) / 1e9
        self.meter.add_all(counts)
        self._journal.batch(staged.number, staged)

    def answered(self, texts: Sequence[Text], exit: int | None) -> None:
        """Counts the answered texts of tenants with exits, by where they have left."""
        if count := len([text for text in texts if text.plan is not None]):
            self.meter.add(names.EXIT_TEXTS, count, "end" if exit is None else str(exit))

    def look(self, levels: dict[Series, float], stager: Stager, watch: Watch) -> None:
        """Updates the levels, those of the encoder among them, and the counts that the slots keep."""
        levels[names.RAISED_EXITS, ()] = len(watch)
        for (tenant, exit), share in watch.agreements().items():
            levels[names.EXIT_AGREEMENT, (tenant, str(exit))] = share
        for layout, slots in stager.slots().items():
            seen = self._seen.get(layout, (0, 0))
            self._seen[layout] = hits, misses = slots.hits, slots.misses
            self.meter.add(names.SLOT_HITS, hits - seen[0], layout.name)
            self.meter.add(names.SLOT_MISSES, misses - seen[1], layout.name)
            levels[names.SLOTS_USED, (layout.name,)] = slots.used
        self.meter.set_all(levels)

    def close(self) -> None:
        self._journal.close()
