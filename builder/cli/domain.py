"""`hplm domain inspect`, `add` and `update`: look into domains of a store, serve them, and build their next versions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from builder.cli.build import TABLE, Table, table_built
from builder.cli.options import open_store
from hplm.cli.domain import Name, changed
from hplm.cli.options import CORPUS, Learn, StoreFolder, about, device_of, read, refuse_given
from hplm.cli.served import HERE, NOWHERE, MaybeServedOptions, ServedOptions
from hplm.cli.show import columns
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from builder.tables.inspection import Coverage


def inspect(
    *, store: StoreFolder, name: Name, version: int | None = None,
    text: Annotated[Path | None, about(f"text to look up: {CORPUS}")] = None,
    keep: Annotated[list[float] | None, read(lambda given: [float(share) for share in given.split(",")])] = None,
) -> dict:  # fmt: skip
    """Print a domain's sizes, its tenants, its frequent n-grams, and how much of a text it covers.

    :param version: version of the domain (default: the newest)
    :param keep: sizes of the table to compare on --text, as shares for --keep of `hplm build`, between commas (default: the
        table's own, and the smaller ones of 1,0.004,0.001,0)
    """
    from builder.console import progress_bar
    from builder.tables.inspection import cover, inspect_branch, read_pieces
    from builder.tables.text_files import check_file

    if text is None and keep:
        raise InvalidInput("--keep needs a text: give one with --text")
    opened = open_store(store)
    result = inspect_branch(opened, name, version)
    _print_branch(result)
    if text is not None:
        check_file(text)
        with progress_bar(title="looking up the text", total=text.stat().st_size, unit="B", unit_scale=True) as bar:
            coverage = cover(opened, name, result["version"], read_pieces(opened, text, bar.update), keep)
        result["coverage"] = asdict(coverage)
        _print_coverage(coverage, text)
    return result


def add(*, name: Name, store: StoreFolder, served: ServedOptions = HERE) -> dict:
    """Serve a domain of the store, without a restart."""
    from builder.publish.live import add_domain

    return changed(manager := served.manager(), add_domain(manager, open_store(store), name))


def update(
    *, name: Name, store: StoreFolder, corpus: Annotated[tuple[Path, ...], about(CORPUS)] = (), canary: float = 1.0,
    of: MaybeServedOptions = NOWHERE, learn: Learn = None, table: Table = TABLE,
) -> dict:  # fmt: skip
    """With --corpus, build a domain's next version; with --repository, serve it and the tenants that were tuned on it.

    :param canary: share of the tuned tenants to move; 1: all
    """
    served = of.served_options()
    if bool(corpus) == (served is not None):
        raise InvalidInput("give either --corpus to build a version, or --repository and --state to serve it")
    if served is None:
        refuse_given("works only with --repository, which serves a version: leave it out", of, canary=canary != 1)
        return _built(store, name, corpus, learn, table)
    from builder.publish.live import update_domain

    reason = "works only with --corpus, which builds a version: leave it out with --repository"
    refuse_given(reason, table, learn=learn is not None)
    return changed(manager := served.manager(), update_domain(manager, open_store(store), name, canary))


def _built(folder: Path, name: str, corpus: tuple[Path, ...], learn: Learn, of: Table) -> dict:
    from builder.learning.limits import Budget
    from builder.tables.domain import UpdateOptions, update_domain
    from builder.tables.inspection import behind

    store, options = open_store(folder), UpdateOptions(of.keep, of.seed, of.dtype, learn, counts=of.counted)
    table = update_domain(store, name, [*corpus], options, Budget(of.most(0.0), of.steps), device_of(of.device))
    built = table_built(store, table, f"domain {name} version {table.meta.version}")
    left = [tenant.id for tenant in behind(store, name, store.readable_tenants())]
    if left:
        print(f"{len(left):,} tenants stay on the version that they were trained on: `hplm domain inspect` lists them")
    return {**built, "behind": left}


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
    print(f"\n{text}: {coverage.tokens:,} tokens{' (the text is longer)' if coverage.cut else ''}\n")
    print(columns(("FOUND AS", "SHARE"), [(name, f"{share:.2%}") for name, share in coverage.levels.items()]))
    print(f"\n{columns([name.upper() for name in coverage.rows[0]], [[*row.values()] for row in coverage.rows])}")
