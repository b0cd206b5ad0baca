"""`hplm domain`: lists, inspects, adds, updates, rolls back and deletes domains of a store, or of a served backbone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hplm.cli.build import TABLE, Table, table_built
from hplm.cli.options import (
    CORPUS,
    Json,
    Learn,
    StoreFolder,
    about,
    device_of,
    open_store,
    read,
    refuse_given,
)  # fmt: skip
from hplm.cli.served import HERE, NOWHERE, MaybeServed, Served, settled
from hplm.errors import InvalidInput, some

if TYPE_CHECKING:
    from builder.store.store import Store
    from builder.tables.inspection import Coverage
    from hplm.tenants.manager import DomainChange, Manager

Name = Annotated[str, about("name of the domain")]


def list_(*, store: StoreFolder | None = None, of: MaybeServed = NOWHERE, json: Json = False) -> dict:
    """Print all domains as a tree, each below the domain that it falls back to."""
    if isinstance(found := _found(store, of), Served):
        from hplm.tenants.listing import served_branches

        rows, source = served_branches(*found.checked()), found.source
    else:
        from builder.tables.inspection import built_branches

        rows, source = built_branches(found), dict[str, str | None]()
    lines = list(_tree(rows))
    width = max((len(name) for name, _ in lines), default=0)
    for name, row in lines:
        print(
            f"{name:<{width}}  {row['ngrams']:>12,} n-grams  {row['tokens']:>14,} tokens  {row['mb']:>10,.1f} MB  "
            f"{row['dtype']}  {row['tenants']:,} tenants"
        )
    return {"domains": rows, **source}


def inspect(
    *, store: StoreFolder, name: Name, version: int | None = None, top: int = 20,
    text: Annotated[Path | None, about(f"text to look up: {CORPUS}")] = None,
    keep: Annotated[list[float] | None, read(lambda given: [float(share) for share in given.split(",")])] = None,
    json: Json = False,
) -> dict:  # fmt: skip
    """Print a domain's sizes, its tenants, its frequent n-grams, and how much of a text it covers.

    :param version: version of the domain (default: the newest)
    :param top: print so many of the most frequent n-grams of each length
    :param keep: sizes of the table to compare on --text, as shares for --keep of `hplm build`, between commas (default: the
        table's own, and the smaller ones of 1,0.004,0.001,0)
    """
    from builder.said import progress_bar
    from builder.tables.inspection import cover, inspect_branch, read_pieces
    from builder.tables.text_files import check_file

    if text is None and keep:
        raise InvalidInput("--keep needs a text: give one with --text")
    opened = open_store(store)
    result = inspect_branch(opened, name, version, top)
    _print_branch(result)
    if text is not None:
        check_file(text)
        with progress_bar(title="looking up the text", total=text.stat().st_size, unit="B", unit_scale=True) as bar:
            coverage = cover(opened, name, result["version"], read_pieces(opened, text, bar.update), keep)
        result["coverage"] = asdict(coverage)
        _print_coverage(coverage, text)
    return result


def add(*, name: Name, store: StoreFolder, served: Served = HERE, json: Json = False) -> dict:
    """Serve a domain of the store, without a restart."""
    from builder.publish.live import add_domain

    return _said(manager := served.manager(), add_domain(manager, open_store(store), name))


def update(
    *, name: Name, store: StoreFolder, corpus: Annotated[tuple[Path, ...], about(CORPUS)] = (), canary: float = 1.0,
    of: MaybeServed = NOWHERE, learn: Learn = "masked", table: Table = TABLE, json: Json = False,
) -> dict:  # fmt: skip
    """With --corpus, build a domain's next version; with --repository, serve it and the tenants that were tuned on it.

    :param canary: share of the tuned tenants to move; 1: all
    """
    served = of.found()
    if bool(corpus) == (served is not None):
        raise InvalidInput("give either --corpus to build a version, or --repository and --state to serve it")
    if served is None:
        refuse_given("works only with --repository, which serves a version: leave it out", of, canary=canary != 1)
        return _built(store, name, corpus, learn, table)
    from builder.publish.live import update_domain

    reason = "works only with --corpus, which builds a version: leave it out with --repository"
    refuse_given(reason, table, learn=learn != "masked")
    return _said(manager := served.manager(), update_domain(manager, open_store(store), name, canary))


def _built(folder: Path, name: str, corpus: tuple[Path, ...], learn: Learn, of: Table) -> dict:
    from builder.learning.limits import Budget
    from builder.tables.domain import UpdateOptions, update_domain
    from builder.tables.inspection import behind

    store, options = open_store(folder), UpdateOptions(of.keep, of.seed, of.dtype, learn)
    table = update_domain(store, name, [*corpus], options, Budget(of.most(0.0), of.steps), device_of(of.device))
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


def _print_branch(result: dict[str, Any]) -> None:
    from builder.tables.inspection import mb

    size, window = result["bytes"], result["window"]
    falls_back = f"falls back to {result['parent']} {result['parent_version']}" if result["parent"] else "a root"
    versions = ", ".join(map(str, result["versions"]))
    print(f"{result['domain']} {result['version']} (versions: {versions}), {falls_back}")
    print(
        f"  {result['ngrams']:,} n-grams of {result['tokens']:,} tokens, {'causal ' if window['causal'] else ''}windows of "
        f"{window['n']}, {result['dtype']} (least cosine {result['least_cosine']})"
    )
    print(
        f"  {mb(sum(size[part] for part in ('values', 'index', 'checksums')))} MB: values {mb(size['values'])}, "
        f"index {mb(size['index'])}, checksums {mb(size['checksums'])}; {size['row']:,} bytes a row"
    )
    print(f"  as fp16 {mb(size['in_fp16'])} MB, as int8 {mb(size['in_int8'])} MB")
    print(f"  used by: {', '.join(result['users']) or 'nobody'}")
    if result["behind"]:
        names = ", ".join(f"{late['tenant']} (version {late['version']})" for late in result["behind"])
        print(f"  behind version {max(result['versions'])}: {names}; move one with `hplm build tenant`")
    for name, ngrams in result["frequent"].items():
        if ngrams:
            print(f"\nmost frequent, {name}")
            for ngram in ngrams:
                print(f"  {ngram['row']:>10,}  {ngram['words']}")


def _print_coverage(coverage: Coverage, text: Path) -> None:
    print(f"\n{text}: {coverage.tokens:,} tokens{' (the text is longer)' if coverage.cut else ''}, windows found as")
    for name, share in coverage.levels.items():
        print(f"  {name:<8} {share:7.2%}")
    print()
    rows = coverage.rows
    for cells in (*(row.keys() for row in rows[:1]), *(row.values() for row in rows)):
        print("  ".join(f"{cell:>12}" for cell in cells))
