"""Prints n-gram tables: a newly built one, or all of them as a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from builder.store.store import Store
    from hplm.plot.table import Table


def table_built(store: Store, table: Table, what: str) -> dict:
    meta = table.meta
    print(f"{what}: {meta.keys:,} n-grams of {meta.corpus_tokens:,} tokens in {meta.megabytes:,.1f} MB")
    page = store.page(meta.domain, meta.version)
    if page.exists():  # an older store has none
        print(f"how it was built: {page}")
    return {
        "domain": meta.domain,
        "version": meta.version,
        "ngrams": meta.keys,
        "tokens": meta.corpus_tokens,
        "mb": meta.megabytes,
        "dtype": meta.dtype,
        "least_cosine": meta.least_cosine,
        "page": str(page) if page.exists() else None,
    }


def print_tree(rows: list[dict[str, Any]]) -> None:
    """Prints each table below the table that it falls back to."""
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
