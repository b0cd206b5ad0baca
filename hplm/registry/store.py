"""Where a registry lies: a folder, or a bucket of an object store. Only CURRENT is ever overwritten.

The names of objects are used once, so that removing one cannot meet somebody who writes it.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hplm.clock import Clock
from hplm.errors import HplmError, InvalidInput, QueueFull

CURRENT = "CURRENT"
SNAPSHOTS, RECORDS, TABLES = "snapshots", "records", "plot"  # what the names of objects begin with
SCHEMES = ("s3", "gs", "az")
_MISTYPED = re.compile(rf"({'|'.join(SCHEMES)})(:|//)", re.IGNORECASE)  # such as s3:/bucket; a folder may be ./s3:


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


class Remote:
    """The address of a bucket, or of a part of it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url


Place = Path | Remote


class Found(NamedTuple):
    name: str
    written: float  # Unix time
    size: int  # bytes


class Store(Protocol):
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

    def names(self, folder: str) -> Iterator[Found]:
        """Yields all objects whose names begin with `folder/`."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Does not mind names that do not exist."""


def objects_of(store: Store, names: Iterable[str]) -> list[str]:
    """Returns these objects, and those below names that end with a slash."""
    found: list[str] = []
    for name in names:
        found += [one.name for one in store.names(name[:-1])] if name.endswith("/") else [name]
    return found


def place_of(text: str) -> Place:
    """Reads the option --state: a folder, or the address of a bucket."""
    scheme, found, rest = text.partition("://")
    if not found and not _MISTYPED.match(text):
        return Path(text)
    if scheme not in SCHEMES or not rest:
        raise InvalidInput(
            f"{text!r} is no place for a registry: give a folder, or an address such as s3://bucket/folder; "
            "a folder of that name is ./NAME"
        )
    return Remote(text)


def opened(place: Place, clock: Clock = time) -> Store:
    if isinstance(place, Path):
        from hplm.registry.folder import Folder

        return Folder(place, clock)
    try:
        from hplm.registry.bucket import Bucket
    except ImportError:
        raise InvalidInput(f"{place} needs the package obstore: install it with `pip install 'hplm[bucket]'`") from None
    return Bucket(place)


def local(place: Place) -> Path:
    """Returns the folder that a server reads: of a bucket, its copy on this machine."""
    if isinstance(place, Path):
        return place
    cache = os.environ.get("HPLM_MIRROR") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hplm"
    return Path(cache) / hashlib.sha256(str(place).encode()).hexdigest()[:12]


def not_begun(place: object) -> NotBegun:
    return NotBegun(
        f"{place} contains no registry ({CURRENT} is missing): name the right --state, mount it, or restore its backup; "
        "`hplm begin` makes a new one, in which nothing was changed since the export"
    )
