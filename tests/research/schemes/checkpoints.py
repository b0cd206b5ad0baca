"""A store that was made from a tiny BERT."""

from __future__ import annotations

from pathlib import Path

import transformers

from builder.store.store import Store
from hplm.model.checkpoint import load_checkpoint, split
from testing.random_store import random_table
from tests.builder.checkpoints import save_bert


def bert_and_store(folder: Path) -> tuple[transformers.BertModel, Store]:
    """Returns a BERT of four layers, and a store with its halves and a root of random numbers."""
    saved = str(save_bert(folder / "bert", vocabulary=200, positions=64))
    read = load_checkpoint(saved, "tiny", 2, 2)
    store = Store.create(folder / "store", saved, read.config, read.tokenizer_json, *split(read))
    random_table(store, "root", 1, None, 2000, 1)
    return transformers.BertModel.from_pretrained(saved, add_pooling_layer=False).eval(), store
