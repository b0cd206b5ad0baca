"""Makes small tables of random values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hplm.model.windows import Window
from hplm.plot.keys import KeySpace
from hplm.plot.meta import TableSpec
from hplm.plot.table import Table
from hplm.plot.writing import write_table

HIDDEN = 48  # three registers of 16 numbers, as the compiled kernel uses


def spec_of(domain: str, parent: str | None, space: KeySpace, dtype: str = "fp16", version: int = 1) -> TableSpec:
    return TableSpec(
        domain=domain,
        version=version,
        parent=parent,
        parent_version=1 if parent else None,
        n=space.window.n,
        causal=space.window.causal,
        vocabulary=space.vocabulary,
        hidden=HIDDEN,
        dtype=dtype,
        corpus_tokens=0,
    )


def values_by(seed: int, window: Window):
    """Returns values that depend only on the window, not on its batch. Absent tokens have zeros."""

    def values_of(windows: np.ndarray) -> torch.Tensor:
        rows = []
        for row in windows:
            generator = torch.Generator().manual_seed(seed + hash(tuple(row.tolist())) % 2**40)
            values = torch.randn(window.vectors, HIDDEN, generator=generator)
            values[torch.from_numpy(row[window.stored] == 0)] = 0
            rows.append(values)
        return torch.stack(rows)

    return values_of


def make_table(folder: Path, domain: str, parent: str | None, space: KeySpace, grams, dtype="fp16", seed=0, **more) -> Table:
    """Grams are tuples of id + 1, in the order of their rows."""
    windows = np.array(list(grams), dtype=np.int64).reshape(-1, space.window.n)
    spec = spec_of(domain, parent, space, dtype)
    return write_table(folder / domain / "1", spec, space.pack(windows), values_by(seed, space.window), batch=3, **more)
