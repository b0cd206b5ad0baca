"""The registry of a backbone, as servers read it: in a folder, or the copy of one (`hplm.registry`).

CURRENT                    the newest generation, and the names of the last snapshots
snapshots/<generation>-*   a snapshot
records/*                  record files of tenants' versions that came since the export
plot/<domain>/<version>-*  tables added since the export
changes/<generation>       who made a generation, when and how
readers/<name>             the generation that a server has taken, written again every second if it may write
SEEN                       only in a copy: when the registry was seen
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hplm.clock import Clock
from hplm.errors import Broken, InvalidInput
from hplm.registry.pointer import Pointer
from hplm.registry.store import CURRENT, RECORDS, SNAPSHOTS, TABLES
from hplm.tenants.snapshot import RESTORE, Snapshot

log = logging.getLogger(__name__)

# The names in an exported model folder.
EXPORTED_CONFIG, EXPORTED_TOKENIZER, EXPORTED_UPPER = "backbone.json", "tokenizer.json", "upper.safetensors"
EXPORTED_TENANTS, EXPORTED_TABLES, EXPORTED_RECORDS = "tenants.json", TABLES, RECORDS
SECONDS_BETWEEN_LOOKS = 0.2  # how often a reader looks for a newer generation
ALIVE_SECONDS = 5.0  # a reader that has not written its file for so long is silent: it may have ended
UNSEEN_SECONDS = 0.5  # how long to wait for readers that may not write
SILENT_SECONDS = 1.5  # how long to wait for silent readers: longer than the interval at which a reader writes
STILL_SECONDS = 0.25  # the most time that counts between two checks: if more has passed, the whole machine was stopped
PATIENCE = 10.0  # how long to wait for readers that are not silent
REST_SECONDS = 60.0  # how long what was freed is kept: longer than a request may still need it


@dataclass(frozen=True)
class ReaderAge:
    """The file of a reader."""

    name: str
    generation: int
    age: float  # seconds since it was written

    @property
    def is_silent(self) -> bool:
        return self.age >= ALIVE_SECONDS


class ReaderFile:
    """A file with the generation that one process has taken. It is removed when the process ends."""

    def __init__(self, state: StateFolder) -> None:
        self._file = state.readers / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._said = -1
        self._at = 0.0
        self._may_write = True

    def say(self, generation: int) -> None:
        if generation == self._said and time.monotonic() - self._at < 1.0:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._file.with_name(f".{self._file.name}")
        fresh.write_text(f"{generation}\n", "utf-8")
        fresh.replace(self._file)
        self._said, self._at = generation, time.monotonic()

    def report(self, generation: int) -> None:
        """Says it, but where this server may not write, which is logged once."""
        if self._may_write:
            try:
                self.say(generation)
            except OSError as error:
                if not may_not_write(error):
                    raise
                self._may_write = False
                log.info("this server does not report its generation to managers: %s", error)

    def close(self) -> None:
        """Nobody waits for it any more, until it says something again."""
        self._said = -1
        with suppress(OSError):
            self._file.unlink()


class StateFolder:
    def __init__(self, folder: Path, clock: Clock = time) -> None:
        self.folder = folder
        self._time = clock
        self.tables = folder / TABLES
        self.records = folder / RECORDS
        self.snapshots = folder / SNAPSHOTS
        self.current_file = folder / CURRENT
        self.readers = folder / "readers"
        self.seen = folder / "SEEN"

    def current(self) -> int:
        """Returns the newest generation. Before the first change, and without a state, this is 0, the export itself."""
        pointer = self.pointer()
        return pointer.generation if pointer is not None else 0

    def pointer(self) -> Pointer | None:
        """Returns what CURRENT says. None: there is no state."""
        try:
            return Pointer.read(self.current_file.read_bytes(), self.current_file)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def has(self, generation: int) -> bool:
        """Whether the snapshot of a generation exists. Only the last generations are kept."""
        pointer = self.pointer()
        return pointer is not None and generation in pointer.snapshots

    def load(self, generation: int) -> Snapshot:
        pointer = self.pointer()
        if pointer is None or generation not in pointer.snapshots:
            raise Broken(f"{self.folder} has no generation {generation}: restore the registry")
        return Snapshot.load(self.snapshots / pointer.snapshots[generation], RESTORE)

    def wait_for_readers(self, generation: int) -> list[str]:
        """Waits until all readers have taken the generation. Returns the names of late readers after ten seconds.

        Readers that may not write get the time to look twice for a new generation. Silent readers get the time to write once
        more, because the whole machine may have been stopped.
        """
        self.forget_readers()
        waited, looked = 0.0, self._time.monotonic()
        ahead = self.clock() - self._time.time()
        while True:
            behind = [taken for taken in self.taken(self._time.time() + ahead) if taken.generation < generation]
            late = [taken.name for taken in behind if not taken.is_silent]
            if waited >= PATIENCE or (not late and waited >= (SILENT_SECONDS if behind else UNSEEN_SECONDS)):
                return sorted(late)
            self._time.sleep(0.05)
            now = self._time.monotonic()
            waited, looked = waited + min(now - looked, STILL_SECONDS), now

    def taken(self, now: float) -> list[ReaderAge]:
        """Returns what readers have taken. `now`: of the clock that dates their files."""
        found: list[ReaderAge] = []
        for file in self.readers.glob("[!.]*"):
            with suppress(FileNotFoundError, ValueError):  # it was removed, or is being written just now
                found.append(ReaderAge(file.name, int(file.read_text("utf-8")), now - file.stat().st_mtime))
        return found

    def forget_readers(self) -> None:
        """Removes the files of readers that have ended long ago."""
        now = self.clock()
        for file in self.readers.glob("*"):
            with suppress(FileNotFoundError):
                if now - file.stat().st_mtime > REST_SECONDS:
                    file.unlink()

    def clock(self) -> float:
        """Returns the time of the clock that dates files here: on a network file system that of its server."""
        if not self.folder.is_dir():
            return self._time.time()
        file = self.folder / f".clock-{secrets.token_hex(3)}"
        file.touch()
        try:
            return file.stat().st_mtime
        finally:
            file.unlink()


def exported_folders(repository: Path, backbone: str | None = None) -> list[Path]:
    """Returns the folder of each exported backbone (`<backbone>/1`), or of the named one."""
    return [path.parent for path in sorted(repository.glob(f"{backbone or '*'}/1/{EXPORTED_TENANTS}"))]


def named_folders(repository: Path, backbone: str | None = None) -> list[Path]:
    """Returns the same. Raises if there is none."""
    if not (found := exported_folders(repository, backbone)):
        which = f"no backbone {backbone!r}" if backbone else "no backbone"
        raise InvalidInput(f"{repository} contains {which}: name the folder of `hplm export` with --repository")
    return found


def may_not_write(error: OSError) -> bool:
    """Whether a reader got this error because its state is read-only for it, which will not pass."""
    return isinstance(error, PermissionError) or error.errno == errno.EROFS
