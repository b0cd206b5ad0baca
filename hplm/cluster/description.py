"""Reads `cluster.json`: the replicas of a cluster, in pools. All replicas of a pool serve the same repository."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import InvalidInput
from hplm.placement.fields import Fields
from hplm.registry.store import Place, place_of
from hplm.tenants.snapshot import NAME

KIND, FORMAT = "hplm replicas", 1
WAY_OUT = "write it as docs/cluster.md says"
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
LARGEST_PORT = 65535


@dataclass(frozen=True)
class Replica:
    """One server. Its id decides its place on the hash ring, so no other replica of the pool may ever get it."""

    id: int
    name: str
    http: str  # HOST:PORT
    grpc: str


@dataclass(frozen=True)
class Pool:
    name: str
    repository: Path
    replicas: tuple[Replica, ...]
    state: Place | None = None
    tenants: frozenset[str] | None = None  # those that it answers; None: all that no other pool names


@dataclass(frozen=True)
class ClusterDescription:
    pools: tuple[Pool, ...]  # the first also gets the requests that name no known tenant

    @classmethod
    def read(cls, path: Path) -> ClusterDescription:
        """Paths in the file begin at its own folder."""
        fields = Fields.of_file(path, KIND, FORMAT, WAY_OUT)
        _check_names(fields, ("kind", "format", "pools", "state"))
        below = path.resolve().parent
        state = _state(fields, below)
        pools = tuple(_pool(entry, below, state) for entry in fields.list("pools"))
        if not pools:
            fields.refuse("pools", "a list with a pool")
        _check_unique("pool", "name", (pool.name for pool in pools), path)
        replicas = [replica for pool in pools for replica in pool.replicas]
        for protocol in ("http", "grpc"):
            _check_unique("replica", protocol, (getattr(replica, protocol) for replica in replicas), path)
        _check_unique("replica", "name", (replica.name for replica in replicas), path)
        return cls(pools)


def _state(fields: Fields, below: Path) -> Place | None:
    """Returns the folder or the bucket that a cluster or a pool names."""
    if "state" not in fields.names():
        return None
    place = place_of(fields.text("state"))
    return below / place if isinstance(place, Path) else place


def _pool(fields: Fields, below: Path, state: Place | None) -> Pool:
    _check_names(fields, ("name", "repository", "state", "tenants", "replicas"))
    replicas = tuple(_replica(entry) for entry in fields.list("replicas"))
    if not replicas:
        fields.refuse("replicas", "a list with a replica")
    _check_unique("replica", "id", (replica.id for replica in replicas), fields.where)
    return Pool(
        name=_name(fields),
        repository=below / fields.text("repository"),
        replicas=replicas,
        state=_state(fields, below) or state,
        tenants=frozenset(fields.texts("tenants")) if "tenants" in fields.names() else None,
    )


def _replica(fields: Fields) -> Replica:
    _check_names(fields, ("id", "name", "http", "grpc"))
    return Replica(fields.whole("id", least=1), _name(fields), _address(fields, "http"), _address(fields, "grpc"))


def _name(fields: Fields) -> str:
    name = fields.text("name")
    return name if NAME.fullmatch(name) else fields.refuse("name", "1-64 lower-case letters, digits, '.', '_' and '-'")


def _address(fields: Fields, name: str) -> str:
    address = fields.text(name)
    if not is_address(address):
        fields.refuse(name, "HOST:PORT, such as 10.0.0.1:8000")
    return address


def is_address(address: str) -> bool:
    """Whether this is HOST:PORT, with an IPv6 address in brackets."""
    host, _, port = address.rpartition(":")
    return bool(HOST.fullmatch(host)) and bool(re.fullmatch(r"[0-9]{1,5}", port)) and 0 < int(port) <= LARGEST_PORT


def _check_names(fields: Fields, known: Collection[str]) -> None:
    unknown = sorted(set(fields.names()) - set(known))
    if unknown:
        raise InvalidInput(f"{fields.where} has the unknown field {unknown[0]!r}: give only {', '.join(map(repr, known))}")


def _check_unique(what: str, name: str, values: Iterable[str | int], where: Path | str) -> None:
    seen: set[str | int] = set()
    for value in values:
        if value in seen:
            raise InvalidInput(f"{where} has two {what}s with the {name} {value!r}: give each one its own")
        seen.add(value)
