"""An optional log with a line of JSON for each request and each batch, to follow a request from arrival to answer.

Times are seconds of this machine's monotonic clock. A request's line also has the wall clock's time of its arrival (`wall`), so
that journals of several machines, and of several boots of one, can be read together. The journal never contains texts.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from hplm.engine.request import Request
from hplm.engine.sheets import StagedBatch
from hplm.errors import InvalidInput
from hplm.metrics.outcomes import outcome_of

log = logging.getLogger(__name__)
LOG = "log"  # write to the server's log instead of a file
NONE = ""


class Journal:
    def __init__(self, where: str, backbone: str) -> None:
        """Several backbones may have journals in one file."""
        self._lock = threading.Lock()
        self._backbone = backbone
        self._file = {NONE: None, LOG: sys.stderr}[where] if where in (NONE, LOG) else _open(Path(where))

    def request(self, request: Request, refused: str, now_ns: int) -> None:
        """`refused`: the word of the error that is its answer."""
        if self._file is None:
            return
        head = request.head
        outcome = refused or outcome_of(head.deadline_ns, now_ns)
        self._write(
            request=request.id,
            tenant=request.tenant.id,
            version=request.tenant.version,
            outcome=outcome,
            texts=request.texts,
            tokens=request.tokens,
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

    def batch(self, number: int, staged: StagedBatch) -> None:
        if self._file is None:
            return
        self._write(
            batch=number,
            texts=len(staged.texts),
            tokens=staged.tokens,
            brought=staged.brought,
            stages={stage: [start / 1e9, end / 1e9] for stage, (start, end) in staged.stages.items()},
        )

    def close(self) -> None:
        with self._lock:
            if self._file not in (None, sys.stderr):
                with suppress(OSError):  # the disk is full
                    self._file.close()
            self._file = None

    def _write(self, **entry: Any) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(json.dumps({**entry, "backbone": self._backbone}) + "\n")
                self._file.flush()
            except OSError as error:  # a full disk must end only the journal, not answers
                log.error("the journal ends here, because it cannot be written: %s", error)
                self._file = None


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
