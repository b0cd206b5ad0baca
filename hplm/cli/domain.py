"""`hplm domain`: lists, inspects, adds, updates, rolls back and deletes domains of a store, or of a served backbone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from hplm.cli.options import (
    CORPUS,
    Device,
    Json,
    Learn,
    Seed,
    StoreFolder,
    TableDtype,
    about,
    device_of,
    open_store,
    refuse_given,
)  # fmt: skip
from hplm.cli.served import HERE, NOWHERE, MaybeServed, Served, print_late
from hplm.cli.tables import print_tree, table_built
from hplm.errors import InvalidInput, some

if TYPE_CHECKING:
    from builder.store.store import Store
    from hplm.tenants.manager import DomainChange, Manager

Name = Annotated[str, about("name of the domain")]


@Parameter(name="*", group="With --corpus")
@dataclass(frozen=True)
class Building:
    """The options of a domain's next version in the store."""

    keep: float | None = None
    """share of the different windows, old and new, to store (default: that of the version before)"""
    dtype: TableDtype | None = None
    minutes: float = 0.0
    """time to adapt the lower layers further, which changes all vectors; 0: keep old vectors"""
    learn: Learn = "masked"
    seed: Seed = 0
    device: Device = "auto"


BUILDING = Building()


def list_(*, store: StoreFolder | None = None, of: MaybeServed = NOWHERE, json: Json = False) -> dict:
    """Print all domains as a tree, each below the domain that it falls back to."""
    if isinstance(found := _found(store, of), Served):
        from hplm.tenants.listing import served_branches

        rows = served_branches(*found.checked())
    else:
        from builder.tables.inspection import built_branches

        rows = built_branches(found)
    print_tree(rows)
    return {"domains": rows}


def add(*, name: Name, store: StoreFolder, served: Served = HERE, json: Json = False) -> dict:
    """Serve a domain of the store, without a restart."""
    from builder.publish.live import add_domain

    return _said(manager := served.manager(), add_domain(manager, open_store(store), name))


def update(
    *, name: Name, store: StoreFolder, corpus: Annotated[tuple[Path, ...], about(CORPUS)] = (), canary: float = 1.0,
    of: MaybeServed = NOWHERE, building: Building = BUILDING, json: Json = False,
) -> dict:  # fmt: skip
    """With --corpus, build a domain's next version; with --repository, serve it and the tenants that were tuned on it.

    :param canary: share of the tuned tenants to move; 1: all
    """
    served = of.found()
    if bool(corpus) == (served is not None):
        raise InvalidInput("give either --corpus to build a version, or --repository and --state to serve it")
    if served is None:
        refuse_given("works only with --repository, which serves a version: leave it out", of, canary=canary != 1)
        return _built(store, name, corpus, building)
    from builder.publish.live import update_domain

    refuse_given("works only with --corpus, which builds a version: leave it out with --repository", building)
    return _said(manager := served.manager(), update_domain(manager, open_store(store), name, canary))


def _built(folder: Path, name: str, corpus: tuple[Path, ...], of: Building) -> dict:
    from builder.learning.limits import Budget
    from builder.tables.domain import UpdateOptions, update_domain
    from builder.tables.inspection import behind

    store, options = open_store(folder), UpdateOptions(of.keep, of.seed, of.dtype, of.learn)
    table = update_domain(store, name, [*corpus], options, Budget(minutes=of.minutes), device_of(of.device))
    built = table_built(store, table, f"domain {name} version {table.meta.version}")
    left = [tenant.id for tenant in behind(store, name, store.readable_tenants())]
    if left:
        print(f"{len(left):,} tenants stay on the version that they were trained on: `hplm domain inspect` lists them")
    return {**built, "behind": left}


def rollback(*, name: Name, served: Served = HERE, json: Json = False) -> dict:
    """Return the tenants of a domain's newest served version to the version that they had before."""
    return _said(manager := served.manager(), manager.roll_back_domain(name))


def delete(
    *, name: Name, store: StoreFolder | None = None, version: int | None = None, of: MaybeServed = NOWHERE, json: Json = False
) -> dict:
    """Delete a domain that no tenant and no other domain needs.

    :param version: with --store: delete only this version (default: all)
    """
    if isinstance(found := _found(store, of), Served):
        refuse_given("works only with --store: a served version is removed when no tenant needs it", version=version)
        return _said(manager := found.manager(), manager.delete_domain(name))
    from builder.tables.domain import delete_domain

    versions = delete_domain(found, name, version)
    print(f"domain {name}: removed version {', '.join(map(str, versions))}")
    return {"domain": name, "removed": versions}


def _found(store: Path | None, of: MaybeServed) -> Store | Served:
    served = of.found()
    if served is not None and store is None:
        return served
    if served is not None or store is None:
        raise InvalidInput("give either --store for a store, or --repository for served domains")
    refuse_given("works only with --repository: leave it out with --store", of)
    return open_store(store)


def _said(manager: Manager, change: DomainChange) -> dict:
    late = manager.settle()
    print(f"domain {change.domain}: version {change.version}, generation {change.generation}")
    for what, names in (("moved", change.moved), ("held back", change.waiting), ("behind", change.behind)):
        if names:
            print(f"  {what:<10} {some(names, 10)}")
    if change.removed:
        print(f"  removed    {', '.join(change.removed)}: no tenant needs it any more")
    print_late(late)
    return {**asdict(change), "late": late}
