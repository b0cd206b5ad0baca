"""Measures what a server takes for a text of one letter: for profiles, which say what the way through a server costs."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.cli.ask import Connection
from hplm.errors import InvalidInput
from hplm.placement.measuring import RoundTrip
from hplm.registry.store import Place
from hplm.server.process_group import computed_ns, members

if TYPE_CHECKING:
    from hplm.server import TritonServer
    from hplm.tenants.snapshot import Tenant

WARMING, REQUESTS = 20, 200


def round_trips(
    repository: Path, state: Place | None, backbones: Sequence[str], cores: Collection[int]
) -> dict[str, RoundTrip]:
    """Serves the repository on these cores for some seconds; on all if none are named. Sends lone requests to each backbone."""
    from hplm.server import TritonServer

    tenants = {name: _open_tenant(repository, state, name) for name in backbones}  # refused before a server starts
    mine = os.sched_getaffinity(0)
    server = TritonServer(repository, state=state)
    try:
        os.sched_setaffinity(0, cores or mine)
        server.start()
        os.sched_setaffinity(0, mine)
        return {name: _measured(server, name, tenant) for name, tenant in tenants.items()}
    finally:
        os.sched_setaffinity(0, mine)
        server.stop()


def _measured(server: TritonServer, backbone: str, tenant: str) -> RoundTrip:
    assert server.pid is not None  # it runs
    taken: list[int] = []
    with Connection(server.grpc_url, "grpc").client(backbone) as client:
        for count in (WARMING, REQUESTS):
            taken.clear()
            before = computed_ns(members(server.pid))
            for _ in range(count):
                start = time.perf_counter_ns()
                client.infer("a", tenant=tenant)
                taken.append(time.perf_counter_ns() - start)
        return RoundTrip(float(statistics.median(taken)), (computed_ns(members(server.pid)) - before) / REQUESTS)


def _open_tenant(repository: Path, state: Place | None, backbone: str) -> str:
    """Returns a tenant that answers everybody, without limits, and from one text."""
    from hplm.tenants.listing import served_tenants
    from hplm.tenants.snapshot import LIMITS

    def suits(tenant: Tenant) -> bool:
        is_free = not tenant.keys and not any(getattr(tenant, limit) for limit in LIMITS)
        return is_free and not tenant.task_object.needs_pair

    found = next((tenant.id for _, tenant in served_tenants(repository, state, backbone) if suits(tenant)), None)
    if found is None:
        raise InvalidInput(
            f"backbone {backbone!r} has no tenant without keys and limits that reads one text, to measure the way "
            "through a server with: leave out --wire"
        )
    return found
