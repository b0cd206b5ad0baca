"""The objects of a registry, in a folder or in a bucket of an object store. Only CURRENT is ever overwritten.

The names of objects are used once, so that removing one cannot meet somebody who writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hplm.errors import HplmError, InvalidInput, QueueFull

CURRENT = "CURRENT"
SNAPSHOTS, RECORDS, TABLES = "snapshots", "records", "plot"  # what the names of objects begin with


class Away(HplmError):
    """The store does not answer. It may soon."""


class Absent(HplmError):
    """The store does not have an object."""


class Busy(QueueFull):
    """Others are changing the registry, and this change was not made."""


class Denied(InvalidInput):
    """The store refuses to read or to write, for want of rights."""


class NotBegun(InvalidInput):
    """There is no registry, or it has lost its CURRENT."""


class Conflict(Exception):
    """Somebody else has changed CURRENT."""


class StoredObject(NamedTuple):
    name: str
    written: float  # Unix time
    size: int  # bytes


class ObjectStore(Protocol):
    """Raises Absent and Away, and Conflict where that is said."""

    def __str__(self) -> str: ...

    def current(self, seen: Any = None) -> tuple[bytes, Any] | None:
        """Returns what CURRENT says and its tag. None: it has not changed since the tag `seen`."""

    def swap(self, content: bytes, seen: Any) -> None:
        """Overwrites CURRENT if it still has the tag `seen`; None: if there is none. All that was put is on disk before."""

    def get(self, name: str) -> bytes: ...

    def fetch(self, name: str, to: Path) -> None:
        """Copies an object of any size into a file."""

    def put(self, name: str, content: bytes | Path) -> None: ...

    def expect_room(self, size: int, what: str) -> None:
        """Raises if there is no room for so many bytes, where there is an end."""

    def names(self, folder: str) -> Iterator[StoredObject]:
        """Yields all objects whose names begin with `folder/`."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Does not mind names that do not exist."""


def objects_of(store: ObjectStore, names: Iterable[str]) -> list[str]:
    """Returns these objects, and those below names that end with a slash."""
    found: list[str] = []
    for name in names:
        found += [one.name for one in store.names(name[:-1])] if name.endswith("/") else [name]
    return found


def not_begun(place: object) -> NotBegun:
    return NotBegun(
        f"{place} contains no registry ({CURRENT} is missing): name the right --state, mount it, or restore its backup; "
        "`hplm begin` makes a new one, in which nothing was changed since the export"
    )
