"""Describes a branch: its sizes, its tenants, the tenants on older versions, its frequent n-grams."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from builder.store.store import Store, TenantFile
from builder.tables.table import table_bytes
from hplm.errors import InvalidInput
from hplm.model.windows import ABSENT
from hplm.plot.table import Table
from hplm.tenants.listing import branch_row


def built_branches(store: Store) -> list[dict[str, Any]]:
    """Returns every branch of a store with its number of tenants."""
    tenants = Counter((tenant.domain, tenant.domain_version) for tenant in store.tenants())
    return [branch_row(store.meta(*branch), tenants[branch]) for branch in store.domains()]


def inspect_branch(store: Store, domain: str, version: int | None, top: int) -> dict[str, Any]:
    """Returns all facts about a branch that need no text. `version`: default is the newest."""
    newest = store.latest(domain)
    version = newest if version is None else version
    versions = [found for name, found in store.domains() if name == domain]
    if version not in versions:
        raise InvalidInput(f"domain {domain!r} has no version {version}: there are {', '.join(map(str, versions))}")
    table = store.table(domain, version)
    meta, sizes = table.meta, table.meta.sizes()
    late = behind(store, domain)
    return {
        "domain": domain,
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
        "users": store.users()[domain, version],
        "behind": [{"tenant": tenant.id, "version": tenant.domain_version} for tenant in late],
        "frequent": frequent(store, table, top),
    }


def behind(store: Store, domain: str) -> list[TenantFile]:
    """Returns the tenants that use an older version than the newest. Building them again moves them to it."""
    newest = store.latest(domain)
    return [tenant for tenant in store.tenants() if tenant.domain == domain and tenant.domain_version < newest]


def frequent(store: Store, table: Table, top: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the `top` most frequent n-grams of each length, the longest first."""
    vocabulary = _pieces(store)
    keys = table.index.by_row()
    found: dict[int, list[dict[str, Any]]] = {tokens: [] for tokens in range(table.meta.n, 0, -1)}
    for start in range(0, len(keys), 1 << 16):
        windows = table.space.unpack(keys[start : start + (1 << 16)])
        held = (windows != ABSENT).sum(1)
        for tokens, ngrams in found.items():
            for i in np.flatnonzero(held == tokens)[: max(0, top - len(ngrams))].tolist():
                ids = [int(token) - 1 for token in windows[i] if token != ABSENT]
                words = " ".join(vocabulary.get(token, f"<{token}>") for token in ids)
                ngrams.append({"row": start + i + 1, "tokens": ids, "words": words})
        if all(len(ngrams) >= top for ngrams in found.values()):
            break
    return {f"{tokens}-gram": ngrams for tokens, ngrams in found.items()}


def _pieces(store: Store) -> dict[int, str]:
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_str((store.folder / "tokenizer.json").read_text("utf-8")).get_vocab()
    return {token: piece for piece, token in vocabulary.items()}
