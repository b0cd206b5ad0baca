"""A tiny BERT saved by Hugging Face, and a store that was made from it."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from builder.store.store import Store
from hplm.model.checkpoint import load_checkpoint, split
from testing.random_store import random_table
from tests.builder.checkpoints import SIZES, save_tokenizer


def save_bert(folder: Path) -> transformers.BertModel:
    torch.manual_seed(3)
    model = transformers.BertModel(transformers.BertConfig(**SIZES, initializer_range=0.2), add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, 200)
    return model


def bert_and_store(folder: Path) -> tuple[transformers.BertModel, Store]:
    """Returns a BERT of four layers, and a store with its halves and a root of random numbers."""
    bert = save_bert(folder / "bert")
    read = load_checkpoint(str(folder / "bert"), "tiny", 2, 2)
    store = Store.create(folder / "store", str(folder / "bert"), read.config, read.tokenizer_json, *split(read))
    random_table(store, "root", 1, None, 2000, 1)
    return bert, store
