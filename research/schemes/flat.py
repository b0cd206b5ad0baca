"""`shared` and `adapter`: hPLMs without precomputed layers, served by the same backends.

All layers are upper layers. The table of such a store has only single tokens, each with the vector of its word.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from builder.store.store import Store, TenantFile
from hplm.plot.writing import write_table
from research.schemes.pretrained import Pretrained

Weights = list[dict[str, torch.Tensor]]


def flat_store(store: Store, folder: Path, whole: Pretrained, with_adapters: bool) -> Store:
    tokenizer_json = (store.folder / "tokenizer.json").read_text("utf-8")
    flat = Store.create(folder, store.model, whole.config, tokenizer_json, whole.lower, whole.upper)
    spec = flat.table_spec("root", 1, None, "fp16", corpus_tokens=0)
    words = whole.lower.words.weight.detach()

    def values_of(windows: np.ndarray) -> torch.Tensor:
        return words[torch.from_numpy(windows - 1)]

    write_table(flat.table_folder("root", 1), spec, flat.space.unigrams(), values_of)
    for tenant in store.tenants():
        adapter, head = store.tenant_weights(tenant)
        adapter = _for_all_layers(flat, tenant, adapter) if with_adapters else None
        flat_tenant = replace(tenant, domain="root", domain_version=1, rank=tenant.rank if adapter is not None else 0)
        flat.save_tenant(flat_tenant, adapter, head, {})
    return flat


def _for_all_layers(flat: Store, tenant: TenantFile, trained: Weights | None) -> Weights | None:
    """Returns adapters for all layers: the trained ones in the upper half, and zeros below, which cost as much time."""
    layout = tenant.adapter_layout(flat.config)
    if trained is None or layout is None:
        return None
    zeros = [
        {name: torch.zeros(shape, dtype=layout.torch_dtype) for name, shape in layout.shapes.items()}
        for _ in range(layout.layers - len(trained))
    ]
    return zeros + trained
