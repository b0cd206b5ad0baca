"""Brings many tenants, with their keys and limits, to what a file says, in one change. Done again, it changes nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta

from hplm.errors import InvalidInput
from hplm.tenants.change import Change
from hplm.tenants.keys import Key, expiry, key_of_digest, new_key
from hplm.tenants.quotas import check_limits
from hplm.tenants.snapshot import NAME, SETTINGS, Tenant

MOST_KEYS = 16  # of a tenant, that a file may ask for
LIMITS = tuple(name for name in SETTINGS if name != "keys")
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, Meta(pattern=rf"^{NAME.pattern}\Z")]
    keys: Annotated[int, Meta(ge=0, le=MOST_KEYS)] | Annotated[list[Digest], Meta(max_length=MOST_KEYS)] = 0
    days: float = 0.0  # until new keys expire; 0: never


Line = msgspec.defstruct("Line", [(name, Any, UNSET) for name in LIMITS], bases=(_Line,), forbid_unknown_fields=True)


@dataclass(frozen=True)
class TenantUpdate:
    """The changes of one tenant."""

    tenant: str
    version: int | None = None  # of the store, that is published
    new_keys: int = 0
    digests: tuple[str, ...] = ()  # of keys that are added
    days: float = 0.0
    limits: Mapping[str, float] = field(default_factory=dict[str, float])
    before: Mapping[str, float] = field(default_factory=dict[str, float])  # those limits until now

    def __str__(self) -> str:
        said = [f"version {self.version} of the store"] if self.version is not None else []
        keys = self.new_keys + len(self.digests)
        said += [f"{keys} more {'key' if keys == 1 else 'keys'}"] if keys else []
        said += [f"{name} {value:,.12g} (was {self.before[name]:,.12g})" for name, value in self.limits.items()]
        return f"tenant {self.tenant}: {', '.join(said)}"


def read_lines(path: Path) -> list[Any]:
    """Reads a file with one JSON object a line. Raises InvalidInput that names the first line which is wrong."""
    found: dict[str, Any] = {}
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line: Any = msgspec.json.decode(text, type=Line)
            expiry(line.days)
            if limits := _limits(line):
                check_limits(limits)
        except (msgspec.DecodeError, UnicodeDecodeError, InvalidInput) as error:
            why = re.sub(r"`", "'", str(error))
            raise InvalidInput(f"line {number} of {path}: {why}. docs/operating.md lists the fields") from None
        if line.id in found:
            raise InvalidInput(f"line {number} of {path}: tenant {line.id!r} has a line already: say all of it in one")
        found[line.id] = line
    if not found:
        raise InvalidInput(f'{path} has no tenants: write one JSON object a line, such as {{"id": "acme", "rate": 5}}')
    return list(found.values())


def planned(tenants: Mapping[str, Tenant], lines: Iterable[Any], newest: Mapping[str, int]) -> list[TenantUpdate]:
    """Returns what has to change. `newest`: the versions of the store's tenants, which are published."""
    updates: list[TenantUpdate] = []
    for line in lines:
        tenant, version = tenants.get(line.id), newest.get(line.id)
        if tenant is None and version is None:
            raise InvalidInput(f"tenant {line.id!r} is not served: give --store with its store, or remove its line")
        keys = tenant.keys if tenant is not None else ()
        known, valid = {key.digest for key in keys}, sum(not key.expires or time.time() < key.expires for key in keys)
        asked: int | list[str] = line.keys
        limits = {name: value for name, value in _limits(line).items() if value != _now(tenant, name)}
        update = TenantUpdate(
            line.id,
            version if tenant is None or (tenant.stored or tenant.version) != version else None,
            max(0, asked - valid) if isinstance(asked, int) else 0,
            () if isinstance(asked, int) else tuple(one for one in dict.fromkeys(asked) if one not in known),
            line.days,
            limits,
            {name: _now(tenant, name) for name in limits},
        )
        if update.version is not None or update.new_keys or update.digests or limits:
            updates.append(update)
    return updates


def made_keys(updates: Iterable[TenantUpdate]) -> dict[str, list[tuple[str, Key]]]:
    """Makes the new keys, and returns them by tenant, each with its secret."""
    return {
        update.tenant: [new_key(expiry(update.days)) for _ in range(update.new_keys)] for update in updates if update.new_keys
    }


def apply(
    change: Change,
    updates: Sequence[TenantUpdate],
    made: Mapping[str, Sequence[tuple[str, Key]]],
    publish: Callable[[Change, str], object],
) -> None:
    """Makes these updates within one change."""
    for update in updates:
        if update.version is not None:
            publish(change, update.tenant)
        tenant = change.tenants[update.tenant]
        given = [key_of_digest(digest, expiry(update.days)) for digest in update.digests]
        keys = (*tenant.keys, *given, *(key for _, key in made.get(update.tenant, ())))
        change.tenants[update.tenant] = replace(tenant, keys=keys, **update.limits)
    change.details = {"tenants": [update.tenant for update in updates]}


def _limits(line: Any) -> dict[str, float]:
    return {name: value for name in LIMITS if (value := getattr(line, name)) is not UNSET}


def _now(tenant: Tenant | None, name: str) -> float:
    """Returns a limit of a tenant; of a new one the default."""
    return getattr(tenant if tenant is not None else Tenant, name)
