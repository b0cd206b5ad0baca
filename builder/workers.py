"""Where the work on many tenants is done: in processes of this machine, or on the machines of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from builder.store.store import Store
from builder.worker_processes import Workers, worker_processes


def workers(
    at_once: int | None,
    address: str | None,
    store: Store,
    domains: Iterable[str],
    others: Iterable[Path] = (),
    device: str = "cpu",
) -> AbstractContextManager[Workers]:
    """Returns the workers for jobs in a store, which get a tenant's name and things that name its files.

    `at_once`: default: one, or as many as the cluster has CPUs. `address`: of a Ray cluster, whose tasks also need the newest
    tables of these domains, and the other files.
    """
    if address is None:
        return worker_processes(at_once or 1, 1 if (at_once or 1) > 1 else None)
    from builder.ray_workers import ray_workers

    return ray_workers(address, at_once, store, {*domains}, others, gpus=int(device.startswith("cuda")))
