"""Counts the batches of the upper half, and keeps the journal: an optional line of JSON for each request and each batch.

The journal follows a request from arrival to answer. Its times are seconds of this machine's monotonic clock. A request's line
also has the wall clock's time of its arrival (`wall`), so that journals of several machines, and of several boots of one, can
be read together. The journal never contains texts.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from hplm.adapters.layout import Layout
from hplm.engine.exits import ExitAudit
from hplm.engine.request import EncoderRequest, Text
from hplm.engine.settings import LOG, NONE
from hplm.engine.sheets import StagedBatch
from hplm.engine.staging import EncoderStager
from hplm.errors import InvalidInput, word_of
from hplm.metrics import names
from hplm.metrics.meter import Meter, Series, outcome_of
from hplm.request.answers import AnswersOrError

log = logging.getLogger(__name__)


class Instruments:
    def __init__(self, journal: str, backbone: str) -> None:
        """`journal`: LOG, NONE, or a file. Several backbones may have journals in one file."""
        self.meter = Meter()
        self._batches = 0
        self._seen: dict[Layout, tuple[int, int]] = {}  # hits and misses that are already counted
        self._backbone = backbone
        self._writing = threading.Lock()
        self._journal = {NONE: None, LOG: sys.stderr}[journal] if journal in (NONE, LOG) else _open(Path(journal))

    def note_answer(self, request: EncoderRequest, answer: AnswersOrError) -> None:
        """Notes a request that was answered or refused. Called once for each request. The model process counts it."""
        if self._journal is None:
            return
        head, now_ns = request.head, time.monotonic_ns()
        self._write(
            request=request.form.id,
            tenant=request.tenant.id,
            version=request.tenant.version,
            outcome=word_of(answer) if isinstance(answer, Exception) else outcome_of(head.deadline_ns, now_ns),
            texts=request.texts,
            tokens=request.form.tokens,
            wall=(time.time_ns() - (now_ns - head.arrival_ns)) / 1e9,
            arrived=head.arrival_ns / 1e9,
            received=head.received_ns / 1e9,
            taken=request.taken_ns / 1e9,
            started=request.started_ns and request.started_ns / 1e9,  # 0: not started
            computed=request.computed_ns and request.computed_ns / 1e9,
            answered=now_ns / 1e9,
            deadline=head.deadline_ns and head.deadline_ns / 1e9,
            batch=request.batch,
            rung=request.rung + 1,
        )

    def note_start(self, staged: StagedBatch) -> None:
        """Notes when a batch starts to compute."""
        if self._journal is None:
            return
        self._batches += 1
        staged.number, started = self._batches, staged.batch.started_ns or 0
        for text in staged.texts:
            request = text.request
            request.started_ns = request.started_ns or started
            request.batch = staged.number

    def reached(self, texts: Sequence[Text], exit: int | None) -> None:
        """Notes when texts were computed, before their requests are answered. Those of tenants with exits count by theirs."""
        if self._journal is not None:
            now = time.monotonic_ns()
            for text in texts:
                text.request.computed_ns = now
        if with_exits := sum([text.plan is not None for text in texts]):
            self.meter.add(names.EXIT_TEXTS, with_exits, "end" if exit is None else str(exit))

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
        if staged.under_way is not None:  # other batches have computed at the same time
            counts[names.STAGE_SECONDS, ("compute",)] = staged.under_way.took_ns / 1e9
        self.meter.add_all(counts)
        if self._journal is not None:
            self._write(
                batch=staged.number,
                texts=len(staged.texts),
                tokens=tokens,
                brought=staged.brought,
                computing=sum(staged.computing_ns) / 1e9,
                stages={stage: [start / 1e9, end / 1e9] for stage, (start, end) in staged.stages.items()},
            )

    def look(self, gauges: dict[Series, float], stager: EncoderStager, audit: ExitAudit) -> None:
        """Updates the gauges, those of the encoder among them, and the counts that the slots keep."""
        gauges[names.RAISED_EXITS, ()] = len(audit)
        for (tenant, exit), share in audit.agreements().items():
            gauges[names.EXIT_AGREEMENT, (tenant, str(exit))] = share
        for layout, slots in stager.slots().items():
            seen = self._seen.get(layout, (0, 0))
            self._seen[layout] = hits, misses = slots.hits, slots.misses
            self.meter.add(names.SLOT_HITS, hits - seen[0], layout.name)
            self.meter.add(names.SLOT_MISSES, misses - seen[1], layout.name)
            gauges[names.SLOTS_USED, (layout.name,)] = slots.used
        self.meter.set_all(gauges)

    def close(self) -> None:
        """Ends the journal."""
        with self._writing:
            if self._journal not in (None, sys.stderr):
                with suppress(OSError):  # the disk is full
                    self._journal.close()
            self._journal = None

    def _write(self, **entry: Any) -> None:
        with self._writing:
            if self._journal is None:
                return
            try:
                self._journal.write(json.dumps({**entry, "backbone": self._backbone}) + "\n")
                self._journal.flush()
            except OSError as error:  # a full disk must end only the journal, not answers
                log.error("the journal ends here, because it cannot be written: %s", error)
                self._journal = None


def _open(path: Path) -> TextIO:
    try:
        file = path.open("a", encoding="utf-8")
        if _ends_in_half_a_line(path):
            file.write("\n")  # it is written with the first line
        return file
    except OSError as error:
        raise InvalidInput(
            f"cannot open '{path}' for parameter 'journal' ({error.strerror}): name a file, or {LOG!r}"
        ) from None


def _ends_in_half_a_line(path: Path) -> bool:
    """Whether the last server was killed while it wrote. Readers pass over such a line."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
