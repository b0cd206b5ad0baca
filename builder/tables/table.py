"""Makes a table in the store from counted n-grams and a lower stack."""

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
from builder.tables.ranking import Ranking
from hplm.model.stacks import LowerStack
from hplm.plot.keys import KeySpace
from hplm.plot.table import Table, TableMeta, TableSpec
from hplm.plot.writing import write_table


def build_table(
    store: Store,
    spec: TableSpec,
    counts: Counts | None,
    lower: LowerStack,
    keep: float,
    device: torch.device,
    work: Path,
    known: Table | None = None,
    show_progress: bool = True,
) -> Table:
    """Builds a table of the most frequent n-grams. The root also holds every single token, so that each lookup ends in it.

    Without counts it holds nothing else.

    Cut anywhere, a call with the same arguments goes on. `known`, an earlier version by the same lower stack, saves computing.
    """
    if counts is None:
        keys = spec.space.unigrams()
    else:
        keys = _ordered_keys(work / "order", spec.space, Ranking(counts, root=spec.parent is None), keep)
    lower = lower.to(device).eval()

    @torch.inference_mode()
    def values_of(windows: np.ndarray) -> Tensor:
        return lower(torch.from_numpy(windows).to(device)).cpu()

    folder = store.table_folder(spec.domain, spec.version)
    title = f"{spec.domain}: computing the table"
    with tqdm(total=len(keys), desc=title, unit="n-gram", unit_scale=True, disable=not show_progress) as bar:
        return write_table(folder, spec, keys, values_of, progress=bar.update, known=known, resume=True)


def table_bytes(meta: TableMeta, ngrams: int, dtype: str) -> int:
    """Returns the bytes of such a table with so many n-grams, without the few bytes of padding after its keys."""
    resized = replace(meta, keys=ngrams, dtype=dtype, index=replace(meta.index, keys=ngrams))
    return sum(resized.sizes().values())


def _ordered_keys(path: Path, space: KeySpace, ranking: Ranking, keep: float) -> np.ndarray:
    """Writes the keys to a file in the order of their rows, since they may not fit in memory."""
    if not path.exists():
        with replaced(path) as writing, open(writing, "wb") as file:
            for chunk in _chosen(space, ranking, keep):
                chunk.astype("<u8").tofile(file)
    if not path.stat().st_size:
        return np.empty((0, space.words), dtype=np.uint64)
    return np.memmap(path, "<u8", "r").reshape(-1, space.words)


def _chosen(space: KeySpace, ranking: Ranking, keep: float) -> Iterator[np.ndarray]:
    """Yields the first keys of the ranking and, for a root, the single tokens that are not among them."""
    unigrams = space.unigrams()
    missing = np.ones(len(unigrams), dtype=bool)
    for chunk in ranking.keys(ranking.number(keep)):
        alone = chunk[((chunk & space.masks[-1]) == chunk).all(1)]
        missing[space.unpack(alone)[:, space.window.centre] - 1] = False
        yield chunk
    if ranking.root:
        yield unigrams[missing]
