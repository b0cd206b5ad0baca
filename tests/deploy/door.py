"""Clients of the front door: the real HAProxy with the file of deploy/haproxy, on a free port."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hplm_client.errors import HplmClientError
from loadtest.proxy import AdminSocket, Proxy, reverse_proxy
from tests.cluster.front import Front
from tests.support.needed import debian_program


def require_haproxy() -> None:
    debian_program("haproxy")


class DoorToAsk(Front):
    def __init__(self, proxy: Proxy) -> None:
        super().__init__(proxy.port, proxy.certificate)
        self.log = proxy.log
        self.socket = AdminSocket(proxy.log.with_name("socket"))  # where it takes commands, if it was told to

    def infer(self, *given: Any, **more: Any) -> HplmClientError | None:
        """Sends a request as `ask` does. Returns what a client of ours raises for the answer."""
        return self.ask(*given, **more).refused

    def waiting(self, backend: str) -> int:
        """Returns how many requests wait in a backend."""
        return sum(
            int(row["qcur"] or 0) for row in self.socket.statistics() if (row["pxname"], row["svname"]) == (backend, "BACKEND")
        )

    def in_flight(self, key: str, table: str = "tenants_in_flight") -> int:
        """Returns how many requests in flight it counts for a key."""
        found = re.findall(rf"key={key} .*conn_cur=(\d+)", self.socket.ask(f"show table {table}"))
        return int(found[0]) if found else 0


@contextmanager
def haproxy(folder: Path, http_url: str, grpc_url: str, backbones: str, **settings: object) -> Iterator[DoorToAsk]:
    with reverse_proxy(folder, http_url, grpc_url, backbones, **settings) as door:
        yield DoorToAsk(door)
        assert "Lua" not in door.log.read_text(errors="replace"), "the filter failed"
