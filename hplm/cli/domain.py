"""`hplm domain`: lists, rolls back and deletes domains of a served backbone, or of a store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hplm.cli.options import StoreFolder, about, refuse_given
from hplm.cli.served import HERE, NOWHERE, MaybeServedOptions, ServedOptions, settled
from hplm.cli.show import columns
from hplm.errors import InvalidInput, some
from hplm.registered import of_stores

if TYPE_CHECKING:
    from hplm.tenants.manager import DomainChange, Manager

Name = Annotated[str, about("name of the domain")]


def list_(*, store: StoreFolder | None = None, of: MaybeServedOptions = NOWHERE) -> dict:
    """Print all domains as a tree, each below the domain that it falls back to."""
    if isinstance(found := _store_or_served(store, of), ServedOptions):
        from hplm.tenants.listing import served_branches

        rows, source = served_branches(*found.checked()), found.source
    else:
        rows, source = of_stores("branches")(of_stores("open")(found)), dict[str, str | None]()
    print(columns(("DOMAIN", "N-GRAMS", "TOKENS", "MB", "DTYPE", "TENANTS"), [
        (name, f"{row['ngrams']:,}", f"{row['tokens']:,}", f"{row['mb']:,.1f}", row["dtype"], f"{row['tenants']:,}")
        for name, row in _tree(rows)
    ]))  # fmt: skip
    return {"domains": rows, **source}


def rollback(*, name: Name, served: ServedOptions = HERE) -> dict:
    """Return the tenants of a domain's newest served version to the version that they had before."""
    return changed(manager := served.manager(), manager.roll_back_domain(name))


def delete(
    *, name: Name, store: StoreFolder | None = None, version: int | None = None, of: MaybeServedOptions = NOWHERE
) -> dict:
    """Delete a domain that no tenant and no other domain needs.

    :param version: with --store: delete only this version (default: all)
    """
    if isinstance(found := _store_or_served(store, of), ServedOptions):
        refuse_given("works only with --store: a served version is removed when no tenant needs it", version=version)
        return changed(manager := found.manager(), manager.delete_domain(name))
    versions = of_stores("delete_domain")(of_stores("open")(found), name, version)
    print(f"domain {name}: removed version {', '.join(map(str, versions))}")
    return {"domain": name, "removed": versions}


def _store_or_served(store: Path | None, of: MaybeServedOptions) -> Path | ServedOptions:
    served = of.served_options()
    if served is not None and store is None:
        return served
    if served is not None or store is None:
        raise InvalidInput("give either --store for a store, or --repository for served domains")
    refuse_given("works only with --repository: leave it out with --store", of)
    return store


def changed(manager: Manager, change: DomainChange) -> dict:
    lines = [f"domain {change.domain}: version {change.version}, generation {change.generation}"]
    for what, names in (("moved", change.moved), ("held back", change.waiting), ("behind", change.behind)):
        if names:
            lines.append(f"  {what:<10} {some(names, 10)}")
    if change.removed:
        lines.append(f"  removed    {', '.join(change.removed)}: no tenant needs it any more")
    return settled(manager, "\n".join(lines), **asdict(change))


def _tree(
    rows: list[dict[str, Any]], parent: tuple[str | None, int | None] = (None, None), depth: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each table and its row, below the table that it falls back to."""
    for row in rows:
        if (row["parent"], row["parent_version"]) == parent:
            yield f"{'  ' * depth}{row['domain']} {row['version']}", row
            yield from _tree(rows, (row["domain"], row["version"]), depth + 1)
