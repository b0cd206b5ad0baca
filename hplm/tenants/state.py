"""The live state of a backbone, as readers see it: snapshots by generation, and CURRENT, which names the newest.

snapshots/<generation>   a snapshot; it never changes after it was renamed to its final name
CURRENT                  the newest generation
readers/<name>           the generation that a reader has taken, written again every second if the reader may write
plot/  adapters/         tables and banks added since the export
registry.sqlite          for managers only
FOLLOWED, HEARD          only in a copy of another machine's state (`hplm follow`)
aside-<random>/          files that a manager copies before its change; if it is killed, the next change removes them
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import Broken, InvalidInput
from hplm.tenants.followed import Followed
from hplm.tenants.snapshot import LIVE, Snapshot

# The names in an exported model folder.
EXPORTED_CONFIG, EXPORTED_TOKENIZER, EXPORTED_UPPER = "backbone.json", "tokenizer.json", "upper.safetensors"
EXPORTED_TENANTS, EXPORTED_TABLES, EXPORTED_BANKS = "tenants.json", "plot", "adapters"
SECONDS_BETWEEN_LOOKS = 0.2  # how often a reader looks for a newer generation
ALIVE_SECONDS = 5.0  # a reader that has not written its file for so long is silent: it may have ended
UNSEEN_SECONDS = 0.5  # how long to wait for readers that may not write
SILENT_SECONDS = 1.5  # how long to wait for silent readers: longer than the interval at which a reader writes
STILL_SECONDS = 0.25  # the most time that counts between two checks: if more has passed, the whole machine was stopped
PATIENCE = 10.0  # how long to wait for readers that are not silent
NEW_SECONDS = 10.0  # the most time between making a folder and locking it
REST_SECONDS = 60.0  # how long a freed record is kept: longer than a request may still need it
REMEMBERED_SECONDS = 3600.0  # how long a silent follower is waited for: it may serve on where nobody can tell it anything


@dataclass(frozen=True)
class Taken:
    """The file of a reader, or of a follower, which speaks for all readers of its copy."""

    name: str
    whole: int  # the newest generation that is served with all that it has
    removed: int  # the newest one of which all that it removed is no longer served: tenants, keys, limits
    follows: bool
    age: float  # seconds since it was written

    @property
    def is_silent(self) -> bool:
        return self.age >= ALIVE_SECONDS

    @classmethod
    def read(cls, file: Path, now: float) -> Taken | None:
        """Returns None if the file was removed, is being written just now, or is that of a follower that serves no more."""
        with suppress(FileNotFoundError, ValueError):
            numbers = [int(word) for word in file.read_text("utf-8").split()]
            if numbers:
                return cls(file.name, numbers[0], numbers[-1], len(numbers) > 1, now - file.stat().st_mtime)
        return None


class Reader:
    """A file with the generation that one process has taken. It is removed when the process ends."""

    def __init__(self, state: State) -> None:
        self._file = state.readers / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._said = -1
        self._at = 0.0

    def say(self, generation: int) -> None:
        if generation == self._said and time.monotonic() - self._at < 1.0:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._file.with_name(f".{self._file.name}")
        fresh.write_text(f"{generation}\n", "utf-8")
        fresh.replace(self._file)
        self._said, self._at = generation, time.monotonic()

    def close(self) -> None:
        """Nobody waits for it any more, until it says something again."""
        self._said = -1
        with suppress(OSError):
            self._file.unlink()


class State:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables = folder / "plot"
        self.banks = folder / "adapters"
        self.snapshots = folder / "snapshots"
        self.current_file = folder / "CURRENT"
        self.readers = folder / "readers"
        self.registry = folder / "registry.sqlite"
        self.followed = folder / "FOLLOWED"
        self.heard = folder / "HEARD"

    def current(self) -> int:
        """Returns the newest generation. Before the first change, and without a state, this is 0, the export itself."""
        try:
            return int(self.current_file.read_text("utf-8"))
        except FileNotFoundError:
            return 0
        except ValueError:
            raise Broken(f"{self.current_file} does not contain the number of a generation: restore the state") from None

    def check_begun(self) -> None:
        """Raises if there is no state. Without it nobody knows of keys and deletions since the export."""
        if not self.current_file.exists():
            raise InvalidInput(
                f"{self.folder} contains no live state ({self.current_file.name} is missing): name the right --state, mount "
                "it, or restore its backup; `hplm begin` makes a new one, in which nothing was changed since the export"
            )

    def begin(self) -> bool:
        """Makes a state with no change since the export, unless there is one. Returns whether it was made now."""
        if self.current_file.exists():
            return False
        self.refuse_copy()
        if any(self.snapshots.glob("*")) or self._was_changed():
            raise InvalidInput(
                f"{self.folder} has lost its {self.current_file.name}: restore its backup, or move it away to begin without it"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.publish(0)
        except OSError as error:
            raise InvalidInput(
                f"cannot begin a live state in {self.folder} ({error.strerror}): run `hplm begin` where it can be written"
            ) from error
        return True

    def _was_changed(self) -> bool:
        """Whether the registry knows of changes. One that cannot be read may."""
        if not self.registry.exists():
            return False
        try:
            with closing(sqlite3.connect(self.registry)) as database:
                if not database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'audit'").fetchone()[0]:
                    return False
                return database.execute("SELECT count(*) FROM audit").fetchone()[0] > 0
        except sqlite3.DatabaseError:
            return True

    def sync_folders(self) -> None:
        """Syncs the folders of snapshots, banks and tables: without it, a power cut may take away a new file's name."""
        for folder in (self.snapshots, self.banks, self.tables, self.folder):
            if folder.exists():
                sync(folder)

    def publish(self, generation: int) -> None:
        """Makes a generation the newest one, whose files are all here."""
        fresh = self.current_file.with_name(f"CURRENT.{secrets.token_hex(3)}.writing")  # two servers may begin at a time
        with open(fresh, "w", encoding="utf-8") as file:
            file.write(f"{generation}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.current_file)
        sync(self.folder)

    def refuse_copy(self) -> None:
        """Raises if this state follows one of another machine, where changes belong."""
        if self.followed.exists():
            raise InvalidInput(f"{self.folder} follows {Followed.load(self.followed).source}: change tenants there")

    def has(self, generation: int) -> bool:
        """Whether the snapshot of a generation exists. Only the last generations are kept."""
        return (self.snapshots / str(generation)).exists()

    def bank(self, name: str) -> Path:
        """Returns the file of a bank, by its name in records."""
        return self.banks / name.removeprefix(LIVE)

    @contextmanager
    def aside(self) -> Generator[Path, None, None]:
        """Makes a temporary folder on the same file system, and locks it so that no other manager removes it."""
        self.sweep_aside()
        folder = self.folder / f"aside-{secrets.token_hex(4)}"
        folder.mkdir()
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(held)

    def sweep_aside(self) -> None:
        """Removes the temporary files of killed managers, and their temporary folders: those that no process locks."""
        for file in (*self.folder.glob("CURRENT.*.writing"), *self.folder.glob(".clock-*")):
            with suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime >= NEW_SECONDS:
                    file.unlink()
        for folder in self.folder.glob("aside-*"):
            with suppress(FileNotFoundError, BlockingIOError):
                if time.time() - folder.stat().st_mtime < NEW_SECONDS:
                    continue
                held = os.open(folder, os.O_RDONLY)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(held)

    def wait_for_readers(self, generation: int, removes: bool = False) -> list[str]:
        """Waits until all readers have taken the generation. Returns the names of late readers after ten seconds.

        Readers that may not write get the time to look twice for a new generation. Silent readers get the time to write once
        more, because the whole machine may have been stopped. `removes`: the change only takes something away, which followers
        do at once, while new tables are still on their way to them.
        """
        waited, looked = 0.0, time.monotonic()
        ahead = self.clock() - time.time()
        while True:
            behind = self._behind(generation, removes, time.time() + ahead)
            late = [taken.name for taken in behind if not taken.is_silent]
            if waited >= PATIENCE or (not late and waited >= (SILENT_SECONDS if behind else UNSEEN_SECONDS)):
                return sorted(late + [taken.name for taken in behind if taken.is_silent and taken.follows])
            time.sleep(0.05)
            now = time.monotonic()
            waited, looked = waited + min(now - looked, STILL_SECONDS), now

    def _behind(self, generation: int, removes: bool, now: float) -> list[Taken]:
        """Returns the readers that have not taken the generation."""
        return [taken for taken in self.taken(now) if (taken.removed if removes else taken.whole) < generation]

    def taken(self, now: float) -> list[Taken]:
        """Returns what readers and followers have taken. `now`: of the clock that dates their files."""
        return [taken for file in self.readers.glob("[!.]*") if (taken := Taken.read(file, now)) is not None]

    def forget_readers(self) -> None:
        """Removes the files of readers that have ended long ago."""
        now = self.clock()
        for file in self.readers.glob("*"):
            with suppress(FileNotFoundError):
                taken = Taken.read(file, now)
                kept = REMEMBERED_SECONDS if taken is not None and taken.follows else REST_SECONDS
                if now - file.stat().st_mtime > kept:
                    file.unlink()

    def clock(self) -> float:
        """Returns the time of the clock that dates files here: on a network file system that of its server."""
        if not self.folder.is_dir():
            return time.time()
        file = self.folder / f".clock-{secrets.token_hex(3)}"
        file.touch()
        try:
            return file.stat().st_mtime
        finally:
            file.unlink()

    def load(self, generation: int) -> Snapshot:
        return Snapshot.load(self.snapshots / str(generation))


def states_of(repository: Path, state: Path, backbone: str | None = None) -> list[State]:
    """Returns the live state of each exported backbone, or of the named one."""
    exports = sorted(repository.glob(f"{backbone or '*'}/1/{EXPORTED_TENANTS}"))
    return [State(state / path.parent.parent.name) for path in exports]


def may_not_write(error: OSError) -> bool:
    """Whether a reader got this error because its state is read-only for it, which will not pass."""
    return isinstance(error, PermissionError) or error.errno == errno.EROFS


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
