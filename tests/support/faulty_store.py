"""A folder whose calls can be counted, cut and failed: every one that writes, syncs, names or removes a file in it.

It hears Python's audit events, which come before such a call, whoever makes it. So a change of files needs no seam of its own.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
NAMED = {"os.rename": 2, "os.link": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "sqlite3.connect": 1}  # paths that it has


class Cut(BaseException):
    """The process is killed here."""


class FaultyStore:
    """Something may happen before one of the calls. After a cut nothing changes any more, as if the process had ended."""

    def __init__(self, folder: Path, decides: str) -> None:
        """`decides`: the name of the file by which readers see a change. All that was written must be on disk before."""
        self.folder = str(folder.resolve())
        self.calls = 0
        self.unsynced: list[str] = []  # what a power cut could have taken from readers
        self._decides = decides
        self._content: set[str] = set()  # files and names that are not yet on disk
        self._names: set[str] = set()
        self._at, self._happens = 0, _nothing
        self._ended = self._busy = False

    @contextmanager
    def at(self, call: int, happens: Callable[[FaultyStore, str, str], None]) -> Iterator[None]:
        """Before this call in the block, counted from 1, something happens: `cut`, `fail`, or what a test does."""
        self.calls, self._at, self._happens, self._ended = 0, call, happens, False
        for remembered in (self.unsynced, self._content, self._names):
            remembered.clear()

        def fsync(file: Any) -> None:  # real ones would take most of a test's time
            descriptor = file if isinstance(file, int) else file.fileno()
            self._hear("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"))

        _heard_by.append(self)
        try:
            with mock.patch("os.fsync", fsync):
                yield
        finally:
            _heard_by.remove(self)

    def cut(self, event: str, path: str) -> None:
        """Ends the process. A file that was about to be written has its first bytes only."""
        self._ended = True
        if event == "open":
            with open(path, "ab") as file:
                file.write(b"torn")
        raise Cut

    def fail(self, event: str, path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called before each event of this process."""
        if event == "open":
            path, mode, flags = arguments
            if not isinstance(path, int) and (flags & WRITES or any(letter in (mode or "r") for letter in "wax+")):
                self._hear(event, _whole(path))
        elif event in NAMED:
            paths, folders = arguments[: NAMED[event]], arguments[NAMED[event] :]
            folders = folders if event != "os.mkdir" else folders[1:]
            self._hear(event, *(_whole(path, *folders[i : i + 1]) for i, path in enumerate(paths)))

    def _hear(self, event: str, *paths: str) -> None:
        if self._busy or not any(path.startswith(self.folder) for path in paths):
            return
        if self._ended:
            raise OSError(errno.EIO, "this process has ended", paths[0])
        self.calls += 1
        self._busy = True
        try:
            if self.calls == self._at:
                self._happens(self, event, paths[0])
            self._remember(event, *paths)
        finally:
            self._busy = False

    def _remember(self, event: str, path: str, to: str = "") -> None:
        """Remembers what is not yet on disk. A rename takes it along."""
        if event == "os.fsync":
            self._content.discard(path)
            self._names -= {name for name in self._names if os.path.dirname(name) == path}
        elif event in ("os.remove", "os.rmdir"):
            self._content.discard(path)
            self._names.discard(path)
        elif event == "os.rename":
            if os.path.basename(to) == self._decides:
                self.unsynced += [name for name in (*self._content, *(self._names - {path})) if os.path.exists(name)]
            for known in (self._content, self._names):
                moved = {name for name in known if name == path or name.startswith(f"{path}/")}
                known.difference_update(moved)
                known.update(to + name.removeprefix(path) for name in moved)
            self._names.add(to)
        elif event == "os.link":
            self._names.add(to)
        elif event in ("open", "os.mkdir"):
            if event == "open":
                self._content.add(path)
            if not os.path.exists(path):
                self._names.add(path)


def _nothing(store: FaultyStore, event: str, path: str) -> None:
    pass


def _whole(path: Any, folder: int = -1) -> str:
    """Returns a path as it is without links in its folder, which may be an open one."""
    path = os.fsdecode(path)
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd(), path)


_heard_by: list[FaultyStore] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _heard_by and (event == "open" or event in NAMED):
        for store in tuple(_heard_by):
            store.hear(event, arguments)


sys.addaudithook(_audit)  # for good: Python lets nobody remove it
