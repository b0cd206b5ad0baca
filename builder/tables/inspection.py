"""What a branch is: its sizes, who stands on it, who is behind, its frequent n-grams."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from builder.store.store import Store, TenantFile
from builder.tables.table import table_bytes
from hplm.errors import InvalidInput
from hplm.model.windows import ABSENT
from hplm.plot.table import Table
from hplm.tenants.listing import branch_row


@dataclass(frozen=True)
class Frequent:
    row: int
    tokens: list[int]
    words: str


def built_branches(store: Store) -> list[dict[str, Any]]:
    """Every branch of a store, with the number of tenants that stand on it."""
    tenants = Counter((tenant.domain, tenant.domain_version) for tenant in store.tenants())
    return [branch_row(store.meta(*branch), tenants[branch]) for branch in store.domains()]


def inspect_branch(store: Store, domain: str, version: int | None, top: int) -> dict[str, Any]:
    """All there is to know about a branch without a text; `version` is by default the newest."""
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
        "frequent": {name: [asdict(ngram) for ngram in ngrams] for name, ngrams in frequent(store, table, top).items()},
    }


def behind(store: Store, domain: str) -> list[TenantFile]:
    """Tenants that stand on an older version than the newest: building them again would move them."""
    newest = store.latest(domain)
    return [tenant for tenant in store.tenants() if tenant.domain == domain and tenant.domain_version < newest]


def frequent(store: Store, table: Table, top: int) -> dict[str, list[Frequent]]:
    """The most frequent n-grams by their number of tokens, the longest first; of each the first `top` in order of rows."""
    vocabulary = _pieces(store)
    keys = table.index.by_row()
    found: dict[int, list[Frequent]] = {tokens: [] for tokens in range(table.meta.n, 0, -1)}
    for start in range(0, len(keys), 1 << 16):
        windows = table.space.unpack(keys[start : start + (1 << 16)])
        held = (windows != ABSENT).sum(1)
        for tokens, ngrams in found.items():
            for i in np.flatnonzero(held == tokens)[: max(0, top - len(ngrams))].tolist():
                ids = [int(token) - 1 for token in windows[i] if token != ABSENT]
                ngrams.append(Frequent(start + i + 1, ids, " ".join(vocabulary.get(token, f"<{token}>") for token in ids)))
        if all(len(ngrams) >= top for ngrams in found.values()):
            break
    return {f"{tokens}-gram": ngrams for tokens, ngrams in found.items()}


def _pieces(store: Store) -> dict[int, str]:
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_str((store.folder / "tokenizer.json").read_text("utf-8")).get_vocab()
    return {token: piece for piece, token in vocabulary.items()}
