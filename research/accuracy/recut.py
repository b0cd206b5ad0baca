"""Tables of another size, from the counts and the layers of a table that is there."""

from __future__ import annotations

from pathlib import Path

import torch

from builder.store.store import Store
from builder.tables.build_folder import held, put_away
from builder.tables.counts import Counts
from builder.tables.table import build_table
from hplm.plot.table import Table


def recut_root(origin: Store, folder: Path, keep: float, device: torch.device) -> Table:
    """Makes a new store with another table of the same corpus and layers."""
    if not (folder / "store.json").exists():
        tokenizer = (origin.folder / "tokenizer.json").read_text("utf-8")
        Store.create(folder, origin.model, origin.config, tokenizer, origin.lower("root", 1), origin.upper())
    return recut_domain(origin, "root", Store(folder), "root", keep, origin.meta("root", 1).dtype, device)


def recut_domain(origin: Store, branch: str, store: Store, name: str, keep: float, dtype: str, device: torch.device) -> Table:
    """Makes another table of a branch's corpus by the same lower layers, as a new branch of a store with the same root.

    Rows of the old table are copied if both store them in the same format.
    """
    build = store.work_folder(name, 1)
    with held(build, f"domain {name!r}"):
        if (name, 1) in store.domains():
            return store.table(name, 1)
        store.remove_branch(name, 1)  # of an interrupted call, perhaps with another size
        put_away(build)
        counts, lower, known = Counts(origin.counts_folder(branch, 1)), origin.lower(branch, 1), origin.table(branch, 1)
        store.save_lower(name, 1, lower)  # before the table, which makes it a branch
        spec = store.table_spec(name, 1, None if name == "root" else ("root", 1), dtype, counts.tokens)
        table = build_table(store, spec, counts, lower, keep, device, build, known if known.meta.dtype == dtype else None)
        put_away(build)
        return table
