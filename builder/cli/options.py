"""Options, stores and workers of several commands of the builder."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from builder.part import Part
from builder.tasks.columns import Columns
from hplm.cli.options import AtLeastOne, about, read
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from builder.store.store import Store
    from builder.worker_processes import Workers

SOME_REFUSED = 3  # exit status: some of many were refused, and the others are done. Any error is 1
PART = "I/N: only each N-th of them, from number I on: the share of one of N machines (docs/building.md)"
RAY = "auto, or HOST:PORT: work on the machines of this Ray cluster, which need no shared disk (docs/building.md)"
RayAddress = Annotated[str | None, about(RAY)]
AtOnce = Annotated[
    AtLeastOne | None, about("so many at a time, each in a process with one thread (default: 1, with all threads)")
]
PartOption = Annotated[Part, read(Part.read, help=PART)]
ColumnNames = Annotated[Columns, Parameter(name="*", group="Columns")]


def open_store(folder: Path) -> Store:
    from builder.store.store import Store

    return Store(folder)


def wanted_start(from_version: int | None, fresh: bool) -> int | None:
    """Returns the version to train on, 0 for none; None: the training chooses."""
    if fresh and from_version is not None:
        raise InvalidInput("give either --from-version or --fresh: a tenant begins once")
    return 0 if fresh else from_version


def workers(
    at_once: int | None, ray: str | None, store: Store, domains: Iterable[str], others: Iterable[Path], device: str = "cpu"
) -> AbstractContextManager[Workers]:
    """Returns what does jobs in a store: each gets a tenant's name, and things that name its files.

    `at_once`: default: one, or as many as a cluster has CPUs. `domains`, `others`: newest tables and files that all tasks of a
    cluster need.
    """
    if ray is None:
        from builder.worker_processes import worker_processes

        return worker_processes(at_once or 1, 1 if (at_once or 1) > 1 else None)
    from builder.ray_workers import ray_workers

    return ray_workers(ray, at_once, store, {*domains}, others, gpus=int(device.startswith("cuda")))


def check_picture(picture: Path | None) -> None:
    """Refuses a file that is no picture, before anything is computed for it."""
    if picture is not None:
        from builder.pictures import check_picture

        check_picture(picture)
