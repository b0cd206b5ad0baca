"""Reads `cluster.json`: the replicas of a repository, between which HAProxy divides the tenants."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hplm.placement.files import Positive, Word, read, refuse_twice
from hplm.tenants.snapshot import NAME

KIND, FORMAT = "hplm replicas", 1
WAY_OUT = "write it as docs/cluster.md says"
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
LARGEST_PORT = 65535
Name = Annotated[str, Meta(pattern=rf"^{NAME.pattern}\Z")]


class Replica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server. Its id decides its place on the hash ring, so no other replica may ever get it."""

    id: Positive
    name: Name
    http: str  # HOST:PORT
    grpc: str

    def __post_init__(self) -> None:
        for address in (self.http, self.grpc):
            if not is_address(address):
                raise ValueError(f"Expected HOST:PORT, such as 10.0.0.1:8000, and not {address!r}")

    @property
    def has_name(self) -> bool:
        """Whether an address begins with a host name, which may mean another machine later."""
        return any(re.search("[A-Za-z]", host) for host in (self.http, self.grpc) if host[0] != "[")


class Replicas(msgspec.Struct, forbid_unknown_fields=True):
    """`spread`: tenants that are too big for one replica. Their requests go to all in turn."""

    kind: str
    format: int
    repository: Word
    replicas: Annotated[tuple[Replica, ...], Meta(min_length=1)]
    spread: tuple[Name, ...] = ()


def read_replicas(path: Path) -> Replicas:
    """Returns the replicas of a cluster. A path in the file begins at its own folder."""
    stored = read(path, KIND, FORMAT, Replicas, WAY_OUT)
    for field in ("id", "name", "http", "grpc"):
        refuse_twice(path, f"replica of {field}", (getattr(replica, field) for replica in stored.replicas))
    stored.repository = str(path.resolve().parent / stored.repository)
    return stored


def is_address(address: str) -> bool:
    """Whether this is HOST:PORT, with an IPv6 address in brackets."""
    host, _, port = address.rpartition(":")
    return bool(HOST.fullmatch(host)) and bool(re.fullmatch(r"[0-9]{1,5}", port)) and 0 < int(port) <= LARGEST_PORT
