"""From counted n-grams and a lower stack to a table in the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from builder.store.resumable import replaced
from builder.store.store import Store
from builder.tables.counts import Counts
from hplm.model.stacks import LowerStack
from hplm.plot.keys import KeySpace
from hplm.plot.table import Table, TableMeta, TableSpec
from hplm.plot.writing import write_table


def build_table(
    store: Store,
    spec: TableSpec,
    counts: Counts,
    lower: LowerStack,
    keep: float,
    device: torch.device,
    work: Path,
    known: Table | None = None,
    show_progress: bool = True,
) -> Table:
    """The corpus's most frequent n-grams; the root holds every token alone besides, so that each lookup ends somewhere.

    Cut anywhere, a call with the same arguments goes on. `known`, an earlier version by the same lower stack, saves computing.
    """
    keys = _ordered_keys(work / "order", spec.space, counts, counts.number(keep), complete=spec.parent is None)
    lower = lower.to(device).eval()

    @torch.inference_mode()
    def values_of(windows: np.ndarray) -> Tensor:
        return lower(torch.from_numpy(windows).to(device)).cpu()

    folder = store.table_folder(spec.domain, spec.version)
    title = f"{spec.domain}: computing the table"
    with tqdm(total=len(keys), desc=title, unit="n-gram", unit_scale=True, disable=not show_progress) as bar:
        return write_table(folder, spec, keys, values_of, progress=bar.update, known=known, resume=True)


def ranked_rows(table: Table, counts: Counts) -> int:
    """How many of its rows, from the first on, are in the order of its counts: all, but for the tokens a root has besides."""
    if table.meta.parent is not None:
        return table.meta.keys
    keys = table.index.by_row()
    same = 0
    for chunk in counts.ranked(len(keys)):
        rows = keys[same : same + len(chunk)]
        differs = (chunk[: len(rows)] != rows).any(1)
        if differs.any():
            return same + int(differs.argmax())
        same += len(rows)
    return same


def table_bytes(meta: TableMeta, ngrams: int, dtype: str) -> int:
    """Of a whole table like this one, with so many n-grams; to the few bytes of padding behind its keys."""
    resized = replace(meta, keys=ngrams, dtype=dtype, index=replace(meta.index, keys=ngrams))
    return sum(resized.sizes().values())


def _ordered_keys(path: Path, space: KeySpace, counts: Counts, number: int, complete: bool) -> np.ndarray:
    """Keys in the order of their rows, in a file: they may be more than memory holds."""
    if not path.exists():
        with replaced(path) as writing, open(writing, "wb") as file:
            for chunk in _ranked(space, counts, number, complete):
                chunk.astype("<u8").tofile(file)
    if not path.stat().st_size:
        return np.empty((0, space.words), dtype=np.uint64)
    return np.memmap(path, "<u8", "r").reshape(-1, space.words)


def _ranked(space: KeySpace, counts: Counts, number: int, complete: bool) -> Iterator[np.ndarray]:
    """The most frequent keys; if `complete`, then the tokens that are not among them."""
    unigrams = space.unigrams()
    missing = np.ones(len(unigrams), dtype=bool)
    for chunk in counts.ranked(number):
        alone = chunk[((chunk & space.masks[-1]) == chunk).all(1)]
        missing[space.unpack(alone)[:, space.window.centre] - 1] = False
        yield chunk
    if complete:
        yield unigrams[missing]
