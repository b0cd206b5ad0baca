"""A store made from the BERT that the fixtures' adapters were trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from builder.store.store import Store
from hplm.adapters.layout import Layout
from hplm.adapters.tiles import Tiles
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.config import BackboneConfig
from testing.random_store import tokenizer_json
from tests.builder.importing.base import SIZES, SPLIT, save_base
from tests.builder.tables.branches import CPU, build, some_lines

FIXTURES = Path(__file__).parent / "fixtures"
LABELS = ["red", "green", "blue"]
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def make_imported_store(folder: Path, lower: int = SPLIT, upper: int | None = None) -> Path:
    """Makes a store with a root. Neither half is adapted, so layers are those of the original."""
    base = folder / "base"
    save_base(base)
    (base / "made.json").write_text(tokenizer_json(SIZES["vocab_size"]))
    PreTrainedTokenizerFast(tokenizer_file=str(base / "made.json"), **SPECIAL).save_pretrained(base)
    checkpoint = load_checkpoint(str(base), "tiny", lower, upper)
    store = Store.create(folder / "store", str(base), checkpoint.config, checkpoint.tokenizer_json, *split(checkpoint))
    build(store, folder, "root", some_lines(20, seed=0))
    return store.folder


def through(
    layers: Sequence[torch.nn.Module],
    x: Tensor,
    config: BackboneConfig,
    layout: Layout | None = None,
    weights: Sequence[dict[str, Tensor]] = (),
) -> Tensor:
    """Returns the hidden states of one sequence after these layers."""
    one = Tiles(np.zeros(len(x), dtype=np.int64), CPU)
    attend = PackedAttention([len(x)], config.heads)
    for i, layer in enumerate(layers):
        if layout is None:
            x = layer(x, attend)
            continue
        slot = {name: tensor.unsqueeze(0) for name, tensor in weights[i].items()}
        x = layer(x, attend, lambda at, before, after, slot=slot: layout.adapt(at, before, after, one, slot))
    return x
