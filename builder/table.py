"""From a lower stack and a corpus to a table in the store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from builder.ngrams import count
from builder.store import Store
from hplm.model.stacks import LowerStack
from hplm.plot.keys import KeySpace
from hplm.plot.table import Table, TableMeta, write_table

BATCH = 4096


def build_table(
    store: Store,
    domain: str,
    version: int,
    parent: tuple[str, int] | None,
    lower: LowerStack,
    documents: Sequence[np.ndarray],
    keep: float,
    dtype: str,
    device: torch.device,
) -> Table:
    """The corpus's most frequent n-grams; the root holds every token alone besides, so that each lookup ends somewhere."""
    config = store.config
    space = KeySpace(config.vocabulary, config.window)
    counts = count(tqdm(documents, desc=f"{domain}: counting n-grams", unit="doc"), space)
    keys = counts.most_frequent(keep)
    if parent is None:
        keys = np.union1d(keys, space.unigrams())
    meta = TableMeta(
        domain=domain,
        version=version,
        parent=parent[0] if parent else None,
        parent_version=parent[1] if parent else None,
        n=config.window,
        vocabulary=config.vocabulary,
        hidden=config.hidden,
        dtype=dtype,
        keys=len(keys),
        corpus_tokens=counts.tokens,
    )
    lower = lower.to(device).eval()

    @torch.inference_mode()
    def values_of(windows: np.ndarray) -> Tensor:
        return lower(torch.from_numpy(windows).to(device)).cpu()

    with tqdm(total=len(keys), desc=f"{domain}: computing the table", unit="n-gram") as bar:
        return write_table(store.table_folder(domain, version), meta, keys, values_of, BATCH, bar.update)
