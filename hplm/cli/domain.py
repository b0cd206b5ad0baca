"""`hplm domain`: the branches of a store or of what is served, as a tree, and what becomes of them."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.cli.build import CORPUS, device_of, learn_option, table_built
from hplm.cli.served import check_state, open_live, served_options
from hplm.errors import InvalidInput
from hplm.options import TABLE_DTYPES

if TYPE_CHECKING:
    from builder.tables.inspection import Coverage
    from hplm.plot.table import TableMeta
    from hplm.tenants.manager import DomainChange


def register(commands: argparse._SubParsersAction) -> None:
    domain = commands.add_parser(
        "domain",
        help="list, inspect, add, update, roll back and delete domains, in a store or live",
        description="With --store: what has been built. With --repository and --state: what is being served.",
    )
    actions = domain.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = _action(actions, "list", run_list, "every branch, as a tree: what it falls back to and who stands on it")
    served_options(listing)
    add = _action(actions, "add", run_add, "serve a domain of the store, without a restart", store=True)
    add.add_argument("--name", required=True)
    served_options(add, required=True)
    _register_update(actions)
    text = "tenants of the newest version served go back to the version they came from"
    rollback = _action(actions, "rollback", run_rollback, text, store=None)
    rollback.add_argument("--name", required=True)
    served_options(rollback, required=True)
    delete = _action(actions, "delete", run_delete, "remove a domain; refused while tenants or domains stand on it")
    delete.add_argument("--name", required=True)
    delete.add_argument("--version", type=int, help="only this one of the store's (default: all)")
    served_options(delete)
    _register_inspect(actions)


def _action(
    actions: argparse._SubParsersAction, name: str, run: object, text: str, store: bool | None = False
) -> argparse.ArgumentParser:
    """`store`: whether one must be given; None: there is none to give."""
    action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    if store is not None:
        action.add_argument("--store", type=Path, required=store, help="folder of what has been built")
    action.add_argument("--json", action="store_true", help="end with one line of JSON")
    action.set_defaults(run=run, default_of=action.get_default)
    return action


def _register_update(actions: argparse._SubParsersAction) -> None:
    text = "with --corpus, build a domain's next version; with --repository, serve it, with the tenants that were tuned on it"
    update = _action(actions, "update", run_update, text, store=True)
    update.add_argument("--name", required=True)
    update.add_argument(
        "--corpus", type=Path, nargs="+", action="extend", help=f"to add to that of the version before; {CORPUS}"
    )
    served_options(update)
    update.add_argument(
        "--canary", type=float, default=1.0, metavar="SHARE", help="of those tenants, to move first (default: all of them)"
    )
    update.add_argument(
        "--keep", type=float, metavar="SHARE", help="of the distinct n-grams, old and new (default: that of the version before)"
    )
    update.add_argument("--dtype", choices=TABLE_DTYPES, help="of the stored values (default: that of the version before)")
    update.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        help="of further adaptation, after which every value is new; 0: none, and old values stay (default: %(default)s)",
    )
    learn_option(update)
    update.add_argument("--seed", type=int, default=0)
    update.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def _register_inspect(actions: argparse._SubParsersAction) -> None:
    text = "sizes, who is behind, frequent n-grams, how much of a text is known"
    inspect = _action(actions, "inspect", run_inspect, text, store=True)
    inspect.add_argument("--name", required=True)
    inspect.add_argument("--version", type=int, help="default: the newest")
    inspect.add_argument(
        "--top", type=int, default=20, metavar="N", help="most frequent n-grams of each length (default: %(default)s)"
    )
    inspect.add_argument("--text", type=Path, metavar="FILE", help=f"to look up; {CORPUS}")
    inspect.add_argument(
        "--keep",
        type=_shares,
        metavar="SHARE,...",
        help="tables of which size to compare on --text (default: 1,0.004,0.001,0 as far as the table tells, and its own)",
    )
    inspect.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the coverage of --text against table size")


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def run_list(args: argparse.Namespace) -> dict:
    from builder.store.store import Store

    if _is_live(args):
        check_state(args.state)
        live = open_live(args)
        snapshot = live.current()
        tenants = Counter((tenant.domain, tenant.domain_version) for tenant in snapshot.tenants)
        branches = sorted((branch.domain, branch.version) for branch in snapshot.branches)
        rows = [_row(live.table(*branch).meta, tenants[branch]) for branch in branches]
    else:
        store = Store(args.store)
        tenants = Counter((tenant.domain, tenant.domain_version) for tenant in store.tenants())
        rows = [_row(store.meta(*branch), tenants[branch]) for branch in store.domains()]
    if not args.json:
        print_tree(rows)
    return {"domains": rows}


def _row(meta: TableMeta, tenants: int) -> dict[str, Any]:
    return {
        "domain": meta.domain,
        "version": meta.version,
        "parent": meta.parent,
        "parent_version": meta.parent_version,
        "ngrams": meta.keys,
        "tokens": meta.corpus_tokens,
        "mb": round(sum(meta.sizes().values()) / 1e6, 3),
        "dtype": meta.dtype,
        "tenants": tenants,
    }


def print_tree(rows: list[dict[str, Any]]) -> None:
    """Each branch below the one it falls back to."""
    lines = list(_tree(rows, (None, None), 0))
    width = max((len(name) for name, _ in lines), default=0)
    for name, row in lines:
        print(
            f"{name:<{width}}  {row['ngrams']:>12,} n-grams  {row['tokens']:>14,} tokens  {row['mb']:>10,.1f} MB  "
            f"{row['dtype']}  {row['tenants']:,} tenants"
        )


def _tree(rows: list[dict[str, Any]], parent: tuple[str | None, int | None], depth: int) -> list[tuple[str, dict[str, Any]]]:
    lines = []
    for row in rows:
        if (row["parent"], row["parent_version"]) == parent:
            lines.append((f"{'  ' * depth}{row['domain']} {row['version']}", row))
            lines += _tree(rows, (row["domain"], row["version"]), depth + 1)
    return lines


def run_update(args: argparse.Namespace) -> dict:
    from builder.adaptation.learning import Budget
    from builder.store.store import Store
    from builder.tables.domain import UpdateOptions, update_domain
    from builder.tables.inspection import behind

    if (args.corpus is None) == (args.repository is None):
        raise InvalidInput("give --corpus to build a version, or --repository and --state to serve it: one of them")
    if args.corpus is None:
        building = ("keep", "dtype", "minutes", "learn", "seed", "device")
        _refuse(args, building, "a version is served as it was built; these are for building it, --corpus")
        return _said(args, open_live(args).update_domain(Store(args.store), args.name, args.canary))
    _refuse(args, ("canary", "state", "backbone"), "a version is built in the store; these are for serving it, --repository")
    store, options = Store(args.store), UpdateOptions(args.keep, args.dtype, args.seed, args.learn)
    table = update_domain(store, args.name, args.corpus, options, Budget(minutes=args.minutes), device_of(args))
    built = table_built(args, table, f"domain {args.name} version {table.meta.version}")
    left = [tenant.id for tenant in behind(store, args.name)]
    if left and not args.json:
        print(f"{len(left):,} tenants stay on the version they were trained on: `hplm domain inspect` names them")
    return {**built, "behind": left}


def run_add(args: argparse.Namespace) -> dict:
    from builder.store.store import Store

    return _said(args, open_live(args).add_domain(Store(args.store), args.name))


def run_rollback(args: argparse.Namespace) -> dict:
    return _said(args, open_live(args).roll_back_domain(args.name))


def _is_live(args: argparse.Namespace) -> bool:
    if (args.store is None) == (args.repository is None):
        raise InvalidInput("give --store for what has been built, or --repository for what is served: one of them")
    if args.repository is None:
        _refuse(args, ("state", "backbone"), "of what is served, which --repository names; --store is what has been built")
    return args.repository is not None


def _refuse(args: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    """Options that mean nothing where they were given."""
    given = [f"--{name}" for name in names if getattr(args, name) != args.default_of(name)]
    if given:
        raise InvalidInput(f"{', '.join(given)}: {reason}")


def _said(args: argparse.Namespace, change: DomainChange) -> dict:
    if not args.json:
        print(f"domain {change.domain}: version {change.version}, generation {change.generation}")
        for what, names in (("moved", change.moved), ("held back", change.waiting), ("behind", change.behind)):
            if names:
                more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
                print(f"  {what:<10} {', '.join(names[:10])}{more}")
        if change.removed:
            print(f"  removed    {', '.join(change.removed)}: nobody stands on it any more")
    return asdict(change)


def run_delete(args: argparse.Namespace) -> dict:
    from builder.store.store import Store
    from builder.tables.domain import delete_domain

    if _is_live(args):
        _refuse(args, ("version",), "what is served goes as a whole, and old versions by themselves when nobody stands on them")
        return _said(args, open_live(args).delete_domain(args.name))
    versions = delete_domain(Store(args.store), args.name, args.version)
    if not args.json:
        print(f"domain {args.name}: removed version {', '.join(map(str, versions))}")
    return {"domain": args.name, "removed": versions}


def run_inspect(args: argparse.Namespace) -> dict:
    from builder.store.store import Store
    from builder.tables.inspection import behind, frequent, table_bytes

    if args.text is None and (args.picture or args.keep):
        raise InvalidInput("--picture and --keep are about how much of a text is known: give one with --text")
    if args.picture is not None:
        from builder.tables.coverage_picture import check_picture

        check_picture(args.picture)
    store = Store(args.store)
    newest = store.latest(args.name)
    version = newest if args.version is None else args.version
    versions = [found for name, found in store.domains() if name == args.name]
    if version not in versions:
        raise InvalidInput(f"domain {args.name!r} has no version {version}: there are {', '.join(map(str, versions))}")
    table = store.table(args.name, version)
    meta, sizes = table.meta, table.meta.sizes()
    late = behind(store, args.name)
    result: dict[str, Any] = {
        "domain": args.name,
        "version": version,
        "versions": versions,
        "parent": meta.parent,
        "parent_version": meta.parent_version,
        "window": {"n": meta.n, "causal": meta.causal},
        "ngrams": meta.keys,
        "tokens": meta.corpus_tokens,
        "dtype": meta.dtype,
        "least_cosine": meta.least_cosine,
        "bytes": {
            "values": sizes["values"],
            "index": sum(meta.index.sizes().values()),
            "checksums": sizes["checksums"],
            "row": meta.row_bytes,
            "in_fp16": table_bytes(meta, meta.keys, "fp16"),
            "in_int8": table_bytes(meta, meta.keys, "int8"),
        },
        "users": store.users()[args.name, version],
        "behind": [{"tenant": tenant.id, "version": tenant.domain_version} for tenant in late],
        "frequent": {name: [asdict(ngram) for ngram in ngrams] for name, ngrams in frequent(store, table, args.top).items()},
    }
    if not args.json:
        _print_branch(result, newest)
    if args.text is not None:
        coverage = _cover(args, store, version)
        result["coverage"] = asdict(coverage)
        if not args.json:
            _print_coverage(coverage, args.text)
        if args.picture is not None:
            from builder.tables.coverage_picture import draw

            draw(coverage, meta, args.text.name, args.picture)
            if not args.json:
                print(f"\npicture: {args.picture}")
    return result


def _cover(args: argparse.Namespace, store: Any, version: int) -> Coverage:
    from tqdm import tqdm

    from builder.tables.inspection import cover
    from builder.tables.text_files import check_file

    check_file(args.text)
    with tqdm(total=args.text.stat().st_size, desc="looking the text up", unit="B", unit_scale=True) as bar:
        return cover(store, args.name, version, args.text, args.keep, bar.update)


def _print_branch(result: dict[str, Any], newest: int) -> None:
    size, window = result["bytes"], result["window"]
    falls_back = f"falls back to {result['parent']} {result['parent_version']}" if result["parent"] else "a root"
    versions = ", ".join(map(str, result["versions"]))
    print(f"{result['domain']} {result['version']} (versions: {versions}), {falls_back}")
    print(
        f"  {result['ngrams']:,} n-grams of {result['tokens']:,} tokens, {'causal ' if window['causal'] else ''}windows of "
        f"{window['n']}, {result['dtype']} (least cosine {result['least_cosine']})"
    )
    print(
        f"  {_mb(sum(size[part] for part in ('values', 'index', 'checksums')))} MB: values {_mb(size['values'])}, "
        f"index {_mb(size['index'])}, checksums {_mb(size['checksums'])}; {size['row']:,} bytes a row"
    )
    print(f"  as fp16 {_mb(size['in_fp16'])} MB, as int8 {_mb(size['in_int8'])} MB")
    print(f"  standing on it: {', '.join(result['users']) or 'nobody'}")
    if result["behind"]:
        names = ", ".join(f"{late['tenant']} (version {late['version']})" for late in result["behind"])
        print(f"  behind version {newest}: {names}; `hplm build tenant` moves one")
    for name, ngrams in result["frequent"].items():
        if ngrams:
            print(f"\nmost frequent, {name}")
            for ngram in ngrams:
                print(f"  {ngram['row']:>10,}  {ngram['words']}")


def _print_coverage(coverage: Coverage, text: Path) -> None:
    print(f"\n{text}: {coverage.tokens:,} tokens{' (the text is longer)' if coverage.cut else ''}, windows found as")
    for name, share in coverage.levels.items():
        print(f"  {name:<8} {share:7.2%}")
    shorter = list(coverage.kept[0].shorter) if coverage.kept else []
    columns = ["keep", "n-grams", "MB fp16", "MB int8", "here", "above", *shorter]
    print("\n" + "  ".join(f"{column:>12}" for column in columns))
    for kept in coverage.kept:
        cells = [f"{kept.keep:.3%}", f"{kept.ngrams:,}", _mb(kept.fp16_bytes), _mb(kept.int8_bytes)]
        cells += [f"{share:.2%}" for share in (kept.here, kept.above, *kept.shorter.values())]
        print("  ".join(f"{cell:>12}" for cell in cells))


def _mb(size: int) -> str:
    megabytes = size / 1e6
    return f"{megabytes:,.0f}" if megabytes >= 100 else f"{megabytes:.3g}"
