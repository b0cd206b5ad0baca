"""Measures how long a server takes for a text of one letter: for profiles, which say what the way through a server costs."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.cli.client import open_client
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from hplm.tenants.snapshot import Tenant

WARMING, REQUESTS = 20, 200


def round_trips(repository: Path, state: Path | None, backbones: Sequence[str]) -> dict[str, float]:
    """Serves the repository for some seconds. Returns the median nanoseconds of lone requests to each backbone."""
    from hplm.server import TritonServer

    tenants = {name: _open_tenant(repository, state, name) for name in backbones}  # refused before a server starts
    with TritonServer(repository, state=state) as server:
        given = argparse.Namespace(url=server.grpc_url, protocol="grpc", key=None, tls=False, ca_file=None)
        return {name: _median(given, name, tenant) for name, tenant in tenants.items()}


def _median(given: argparse.Namespace, backbone: str, tenant: str) -> float:
    taken: list[int] = []
    with open_client(given, backbone) as client:
        for _ in range(WARMING + REQUESTS):
            start = time.perf_counter_ns()
            client.infer("a", tenant=tenant)
            taken.append(time.perf_counter_ns() - start)
    return float(statistics.median(taken[WARMING:]))


def _open_tenant(repository: Path, state: Path | None, backbone: str) -> str:
    """Returns a tenant that answers everybody, without limits, with all layers, and from one text."""
    from hplm.tenants.listing import served_tenants
    from hplm.tenants.snapshot import LIMITS

    def suits(tenant: Tenant) -> bool:
        is_free = not tenant.keys and not any(getattr(tenant, limit) for limit in LIMITS)
        return is_free and not tenant.ladder and not tenant.task_object.needs_pair

    found = next((tenant.id for _, tenant in served_tenants(repository, state, backbone) if suits(tenant)), None)
    if found is None:
        raise InvalidInput(
            f"backbone {backbone!r} has no tenant without keys, limits and ladder that reads one text, to measure the way "
            "through a server with: leave out --wire"
        )
    return found
