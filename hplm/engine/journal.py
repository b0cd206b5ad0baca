"""A line of JSON for each request and each batch, if asked for: one request can be followed from its arrival to its answer.

Times are seconds of one clock of this machine. No text is ever in it.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from hplm.engine.request import Trip
from hplm.engine.staging import StagedBatch
from hplm.errors import InvalidInput

log = logging.getLogger(__name__)
LOG = "log"  # into the server's log instead of a file
NONE = ""


class Journal:
    def __init__(self, where: str) -> None:
        self._lock = threading.Lock()
        self._file = {NONE: None, LOG: sys.stderr}[where] if where in (NONE, LOG) else _open(Path(where))

    def request(self, trip: Trip, tenant: str, version: int, outcome: str, now_ns: int) -> None:
        self._write(
            request=trip.id,
            tenant=tenant,
            version=version,
            outcome=outcome,
            texts=trip.texts,
            tokens=trip.tokens,
            arrived=trip.arrival_ns / 1e9,
            taken=trip.taken_ns / 1e9,
            started=trip.started_ns and trip.started_ns / 1e9,  # 0: never
            computed=trip.computed_ns and trip.computed_ns / 1e9,
            answered=now_ns / 1e9,
            deadline=trip.deadline_ns and trip.deadline_ns / 1e9,
            batch=trip.batch,
        )

    def batch(self, number: int, staged: StagedBatch) -> None:
        self._write(
            batch=number,
            texts=len(staged.works),
            tokens=sum(work.tokens for work in staged.works),
            brought=staged.brought,
            stages={stage: [start / 1e9, end / 1e9] for stage, (start, end) in staged.stages.items()},
        )

    def close(self) -> None:
        with self._lock:
            if self._file not in (None, sys.stderr):
                self._file.close()
            self._file = None

    def _write(self, **entry: Any) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()
            except OSError as error:  # a full disk is to cost the journal, and no answer
                log.error("the journal ends here, it cannot be written: %s", error)
                self._file = None


def _open(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"parameter 'journal' is '{path}': {error.strerror}; name a file, or {LOG!r}") from None
