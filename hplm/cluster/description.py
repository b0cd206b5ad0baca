"""Reads `cluster.json`: the replicas of a cluster, in pools. All replicas of a pool serve the same repository."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hplm.placement.files import Positive, Word, read, refuse_twice
from hplm.registry.store import Place, place_of
from hplm.tenants.snapshot import NAME

KIND, FORMAT = "hplm replicas", 1
WAY_OUT = "write it as docs/cluster.md says"
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
LARGEST_PORT = 65535
Name = Annotated[str, Meta(pattern=rf"^{NAME.pattern}\Z")]


class Replica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server. Its id decides its place on the hash ring, so no other replica of the pool may ever get it."""

    id: Positive
    name: Name
    http: str  # HOST:PORT
    grpc: str

    def __post_init__(self) -> None:
        for address in (self.http, self.grpc):
            if not is_address(address):
                raise ValueError(f"Expected HOST:PORT, such as 10.0.0.1:8000, and not {address!r}")


@dataclass(frozen=True)
class Pool:
    name: str
    repository: Path
    replicas: tuple[Replica, ...]
    state: Place | None = None
    tenants: frozenset[str] | None = None  # those that it answers; None: all that no other pool names


class _Pool(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    repository: Word
    replicas: Annotated[tuple[Replica, ...], Meta(min_length=1)]
    state: Word | None = None
    tenants: frozenset[str] | None = None


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    format: int
    pools: Annotated[tuple[_Pool, ...], Meta(min_length=1)]
    state: Word | None = None


def read_pools(path: Path) -> tuple[Pool, ...]:
    """Returns the pools of a cluster; the first also gets the requests that name no known tenant.

    Paths in the file begin at its own folder.
    """
    stored = read(path, KIND, FORMAT, _Stored, WAY_OUT)
    below = path.resolve().parent
    pools: list[Pool] = []
    for own in stored.pools:
        refuse_twice(path, f"pool {own.name!r}: replica of id", (replica.id for replica in own.replicas))
        named = own.state or stored.state
        place = place_of(named) if named is not None else None
        state = below / place if isinstance(place, Path) else place
        pools.append(Pool(own.name, below / own.repository, own.replicas, state, own.tenants))
    refuse_twice(path, "pools: the name", (pool.name for pool in pools))
    replicas = [replica for pool in pools for replica in pool.replicas]
    for name in ("http", "grpc", "name"):
        refuse_twice(path, f"replica of {name}", (getattr(replica, name) for replica in replicas))
    return tuple(pools)


def is_address(address: str) -> bool:
    """Whether this is HOST:PORT, with an IPv6 address in brackets."""
    host, _, port = address.rpartition(":")
    return bool(HOST.fullmatch(host)) and bool(re.fullmatch(r"[0-9]{1,5}", port)) and 0 < int(port) <= LARGEST_PORT
