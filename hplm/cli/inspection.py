"""`hplm domain inspect`: prints the size and content of a domain's table, and how much of a text it covers."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.cli.options import CORPUS
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from builder.store.store import Store
    from builder.tables.coverage import Coverage

TEXT = "print a domain's sizes, its tenants, its frequent n-grams, and how much of a text it covers"


def register(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("--name", required=True, help="name of the domain")
    inspect.add_argument("--version", type=int, help="version of the domain (default: the newest)")
    inspect.add_argument(
        "--top",
        type=int,
        default=20,
        metavar="N",
        help="print the N most frequent n-grams of each length (default: %(default)s)",
    )
    inspect.add_argument("--text", type=Path, metavar="FILE", help=f"text to look up: {CORPUS}")
    inspect.add_argument(
        "--keep",
        type=_shares,
        metavar="SHARE,...",
        help="sizes of the table to compare on --text, as shares for --keep of `hplm build` (default: the table's own, and "
        "the smaller ones of 1,0.004,0.001,0)",
    )
    inspect.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the coverage of --text against table size")


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> dict:
    from builder.store.store import Store
    from builder.tables.inspection import inspect_branch

    if args.text is None and (args.picture or args.keep):
        raise InvalidInput("--picture and --keep need a text: give one with --text")
    if args.picture is not None:
        from builder.tables.coverage_picture import check_picture

        check_picture(args.picture)
    store = Store(args.store)
    result = inspect_branch(store, args.name, args.version, args.top)
    if not args.json:
        _print_branch(result)
    if args.text is not None:
        coverage = _cover(args, store, result["version"])
        result["coverage"] = asdict(coverage)
        if not args.json:
            _print_coverage(coverage, args.text)
        if args.picture is not None:
            from builder.tables.coverage_picture import draw

            draw(coverage, store.meta(args.name, result["version"]), args.text.name, args.picture)
            if not args.json:
                print(f"\npicture: {args.picture}")
    return result


def _cover(args: argparse.Namespace, store: Store, version: int) -> Coverage:
    from tqdm import tqdm

    from builder.tables.coverage import cover
    from builder.tables.text_files import check_file

    check_file(args.text)
    with tqdm(total=args.text.stat().st_size, desc="looking up the text", unit="B", unit_scale=True) as bar:
        return cover(store, args.name, version, args.text, args.keep, bar.update)


def _print_branch(result: dict[str, Any]) -> None:
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
