"""A file of finished numbers, one JSON line each and sorted, so that no number is computed twice and none is lost."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from builder.store.resumable import replaced
from hplm.errors import InvalidInput


class StoredResult(NamedTuple):
    run: dict[str, Any]  # everything that the number depends on
    result: dict[str, Any]


@dataclass(frozen=True)
class ResultFile:
    """A line is `{"run": ..., "digest": ..., "result": ...}`; a run is found by its digest."""

    path: Path

    def get(self, run: dict[str, Any]) -> dict[str, Any] | None:
        return self.of([run])[0]

    def of(self, runs: Iterable[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """Returns the result of each run; None: it is missing."""
        finished = self._finished()
        return [dict(found.result) if (found := finished.get(digest_of(run))) else None for run in runs]

    def put(self, run: dict[str, Any], result: dict[str, Any]) -> None:
        """Replaces the file by one with this line. Several processes may do so at a time, and a cut leaves the old file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            every = {**self._finished(), digest_of(run): StoredResult(run, result)}
            lines = sorted(json.dumps({"run": own, "digest": digest, "result": one}) for digest, (own, one) in every.items())
            with replaced(self.path) as temporary:
                temporary.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        finally:
            os.close(lock)

    def __iter__(self) -> Iterator[StoredResult]:
        return iter(self._finished().values())

    def _finished(self) -> dict[str, StoredResult]:
        found: dict[str, StoredResult] = {}
        if not self.path.exists():
            return found
        for number, line in enumerate(self.path.read_text("utf-8").splitlines(), 1):
            try:
                stored = json.loads(line)
                digest, one = stored["digest"], StoredResult(dict(stored["run"]), dict(stored["result"]))
            except (ValueError, TypeError, KeyError):
                raise InvalidInput(f"{self.path}, line {number}: no result can be read there: repair or remove it") from None
            if digest != digest_of(one.run) or digest in found:  # of a merge of two files, for one
                raise InvalidInput(f"{self.path}, line {number}: the run {digest} is changed or there twice: remove the line")
            found[digest] = one
        return found


def digest_of(run: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:12]
