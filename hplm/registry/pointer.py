"""CURRENT names the newest generation of a registry and its last snapshots."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from hplm.errors import Broken, InvalidInput
from hplm.options import LEASE_SECONDS
from hplm.registry.store import CURRENT, SNAPSHOTS, Absent, Conflict, ObjectStore

FORMAT = 2
WAY_OUT = "restore the registry, or begin another one with `hplm begin`"
KEPT_SNAPSHOTS = 16


class CopiedRegistry(msgspec.Struct, frozen=True):
    """The registry that a copy is of, and how far the copy is. Such a registry is changed there."""

    address: str
    generation: int
    snapshot: str = ""  # its name; none of generation 0


class Pointer(msgspec.Struct, frozen=True):
    generation: int
    lineage: str  # of a registry and its copies: another one's generations have nothing to do with these
    snapshots: dict[int, str] = {}  # names of the last ones by generation; 0 is the export itself
    lease_s: float = LEASE_SECONDS  # how long a server answers for tenants with keys without having seen the registry
    lease_until: float = 0.0  # until when a server that is cut off may go by a longer lease from before (Unix time)
    copied: CopiedRegistry | None = None
    format: int = FORMAT

    def then(self, generation: int, name: str) -> Pointer:
        """Returns what CURRENT says after the next change."""
        kept = {**self.snapshots, generation: name}
        last = sorted(kept)[-KEPT_SNAPSHOTS:]
        return msgspec.structs.replace(self, generation=generation, snapshots={number: kept[number] for number in last})

    def leased(self, lease_s: float, now: float) -> Pointer:
        """Returns the same with another lease. `now`: Unix time."""
        longer = now + self.lease_s if lease_s < self.lease_s else 0.0
        return msgspec.structs.replace(self, lease_s=lease_s, lease_until=max(self.lease_until, longer))

    @property
    def snapshot(self) -> str:
        """The name of the newest snapshot; none of generation 0."""
        return self.snapshots[self.generation] if self.generation else ""

    def written(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def read(cls, text: bytes, place: object) -> Pointer:
        try:
            found = msgspec.json.decode(text, type=Pointer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Broken(f"{place} does not say which generation is the newest ({error}): {WAY_OUT}") from None
        if found.format != FORMAT or found.generation < 0 or (found.generation and found.generation not in found.snapshots):
            raise Broken(f"{place} has format {found.format}, or no snapshot of its generation: {WAY_OUT}")
        return found


class HasCurrent(Protocol):
    """A place to follow: a store, or the export alone."""

    def current(self, seen: Any = None) -> tuple[bytes, Any] | None: ...


def read_current(store: HasCurrent, seen: Any = None) -> tuple[Pointer, Any] | None:
    """Returns what CURRENT says and its tag. None: it has not changed since the tag `seen`. Raises Absent if there is none."""
    found = store.current(seen)
    return (Pointer.read(found[0], f"{store}/{CURRENT}"), found[1]) if found is not None else None


def is_begun(store: ObjectStore, anew: bool = False) -> bool:
    """Whether there is a registry. Raises where one has lost its CURRENT, unless it may be made `anew`."""
    with suppress(Absent):
        return read_current(store) is not None
    if not anew and next(iter(store.names(SNAPSHOTS)), None) is not None:
        raise InvalidInput(f"{store} has lost its {CURRENT}: restore its backup, or move it away to begin without it")
    return False


def begin(store: ObjectStore, lease_s: float = LEASE_SECONDS) -> bool:
    """Makes a registry without changes, unless there is one. Returns whether it was made now."""
    if is_begun(store):
        return False
    try:
        store.swap(Pointer(0, secrets.token_hex(8), lease_s=lease_s).written(), None)
    except Conflict:  # somebody else has just begun it
        return False
    except OSError as error:
        raise InvalidInput(
            f"cannot begin a registry in {store} ({error.strerror}): run `hplm begin` where it can be written"
        ) from error
    return True
