"""A registry in a folder, which may be on a network file system."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hplm.clock import Clock
from hplm.disk import check_room
from hplm.errors import OutOfCapacity
from hplm.registry.store import CURRENT, Absent, Away, Busy, Conflict, Denied, StoredObject

WRITING = ".writing"  # ends the name of a file that is not complete
LOCK = "LOCK"
LOCK_SECONDS = 60.0  # that somebody waits for others


class Folder:
    def __init__(self, path: Path, clock: Clock = time) -> None:
        self.path = path
        self._time = clock
        self._unsynced: set[Path] = set()  # folders with new names
        self._changing = threading.Lock()  # of that set

    def __str__(self) -> str:
        return str(self.path)

    def current(self, seen: bytes | None = None) -> tuple[bytes, bytes] | None:
        content = self.get(CURRENT)
        return None if content == seen else (content, content)

    def swap(self, content: bytes, seen: bytes | None) -> None:
        with self.alone():
            try:
                now = self.get(CURRENT)
            except Absent:
                now = None
            if now != seen:
                raise Conflict
            with self._changing:
                unsynced, self._unsynced = self._unsynced, set()
            for folder in sorted(unsynced, reverse=True):  # a folder before the one with its name
                with suppress(FileNotFoundError):  # a change that failed has removed it again
                    sync(folder)
            self._write(self.path / CURRENT, self.path / f"{CURRENT}{WRITING}", content)
            sync(self.path)

    def get(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise Absent(f"{self.path / name} is missing") from None
        except OSError as error:
            raise Away(f"cannot read {self.path / name}: {error.strerror}") from None

    def fetch(self, name: str, to: Path) -> None:
        try:
            shutil.copyfile(self.path / name, to)
        except FileNotFoundError:
            raise Absent(f"{self.path / name} is missing") from None
        sync(to)

    def put(self, name: str, content: bytes | Path) -> None:
        path = self.path / name
        self._write(path, path.with_name(f"{path.name}.{secrets.token_hex(3)}{WRITING}"), content)  # two may write it at a time
        self._changed(path.parent)

    def expect_room(self, size: int, what: str) -> None:
        check_room(self.path, size, what, f"free some space for {self.path}")

    def names(self, folder: str) -> Iterator[StoredObject]:
        for path in sorted((self.path / folder).rglob("*")):
            with suppress(FileNotFoundError):
                if path.is_file():
                    found = path.stat()
                    # Not the time of its content, which a link has from long ago.
                    yield StoredObject(str(path.relative_to(self.path)), found.st_ctime, found.st_size)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.path / name
            path.unlink(missing_ok=True)
            with suppress(OSError):  # others are in it
                while path.parent != self.path:
                    path = path.parent
                    path.rmdir()

    @contextmanager
    def alone(self) -> Generator[None, None, None]:
        """Excludes everybody else who swaps. A process that ends lets go."""
        self._make(self.path)
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            until = self._time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._time.monotonic() >= until:
                        raise Busy(
                            f"another manager has been changing {self.path} for {LOCK_SECONDS:.0f} s: try again"
                        ) from None
                    self._time.sleep(0.01)
            yield
        finally:
            os.close(lock)

    def _make(self, folder: Path) -> None:
        for missing in missing_folders(folder):
            missing.mkdir(parents=True, exist_ok=True)  # somebody may have removed empty ones meanwhile
            self._changed(missing.parent)

    def _changed(self, folder: Path) -> None:
        with self._changing:
            self._unsynced.add(folder)

    def _write(self, path: Path, fresh: Path, content: bytes | Path) -> None:
        try:
            self._make(path.parent)
            _fill(fresh, content)
            fresh.replace(path)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfCapacity(f"cannot write {path} ({error.strerror}), so nothing was changed: free space") from error
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise Denied(
                    f"cannot write {path} ({error.strerror}), so nothing was changed: do it where and as who can write there"
                ) from error
            raise


def _fill(path: Path, content: bytes | Path) -> None:
    """Writes a file and syncs it. A file on the same file system is linked, because nobody changes it."""
    if isinstance(content, Path):
        try:
            os.link(content.resolve(), path)
        except OSError:
            shutil.copyfile(content, path)
        sync(path)
        return
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def missing_folders(folder: Path) -> list[Path]:
    """Returns which of a folder and those above it are missing, the highest first."""
    return [own for own in (*reversed(folder.parents), folder) if not own.exists()]


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
