"""`hplm domain inspect`: prints the size and content of a domain's table, and how much of a text it covers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hplm.cli.options import CORPUS, Json, StoreFolder, about, check_picture, open_store, read
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from builder.store.store import Store
    from builder.tables.inspection import Coverage


def inspect(
    *, store: StoreFolder, name: str, version: int | None = None, top: int = 20,
    text: Annotated[Path | None, about(f"text to look up: {CORPUS}")] = None,
    keep: Annotated[list[float] | None, read(lambda given: [float(share) for share in given.split(",")])] = None,
    picture: Path | None = None, json: Json = False,
) -> dict:  # fmt: skip
    """Print a domain's sizes, its tenants, its frequent n-grams, and how much of a text it covers.

    :param name: name of the domain
    :param version: version of the domain (default: the newest)
    :param top: print so many of the most frequent n-grams of each length
    :param keep: sizes of the table to compare on --text, as shares for --keep of `hplm build`, between commas (default: the
        table's own, and the smaller ones of 1,0.004,0.001,0)
    :param picture: draw the coverage of --text against table size into a .png, .svg or .pdf file
    """
    from builder.tables.inspection import inspect_branch

    if text is None and (picture or keep):
        raise InvalidInput("--picture and --keep need a text: give one with --text")
    check_picture(picture)
    opened = open_store(store)
    result = inspect_branch(opened, name, version, top)
    _print_branch(result)
    if text is not None:
        coverage = _cover(opened, name, result["version"], text, keep)
        result["coverage"] = asdict(coverage)
        _print_coverage(coverage, text)
        if picture is not None:
            from builder.pictures import draw_coverage

            draw_coverage(coverage, opened.meta(name, result["version"]), text.name, picture)
            print(f"\npicture: {picture}")
    return result


def _cover(store: Store, name: str, version: int, text: Path, keep: list[float] | None) -> Coverage:
    from tqdm import tqdm

    from builder.tables.inspection import cover, read_pieces
    from builder.tables.text_files import check_file

    check_file(text)
    with tqdm(total=text.stat().st_size, desc="looking up the text", unit="B", unit_scale=True) as bar:
        return cover(store, name, version, read_pieces(store, text, bar.update), keep)


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
