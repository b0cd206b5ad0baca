"""A tiny BERT saved by Hugging Face, and a store that was made from it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from builder.store.store import Store, TenantFile
from hplm.model.checkpoint import load_checkpoint, split
from testing.random_store import random_table, random_tenant
from tests.builder.checkpoints import SIZES, save_tokenizer

TENANTS = [
    TenantFile("acme", 1, "root", 1, "classify", ["red", "green", "blue"], 4),
    TenantFile("beta", 1, "root", 1, "tag", ["O", "PART"], 0),
    TenantFile("city", 1, "root", 1, "classify", ["no", "yes"], 0, head_function="tanh"),
    TenantFile("dune", 1, "root", 1, "multilabel", ["a", "b", "c"], 0),
]


def save_bert(folder: Path) -> BertModel:
    torch.manual_seed(3)
    model = BertModel(BertConfig(**SIZES, initializer_range=0.2), add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, 200)
    return model


def make_store(folder: Path, model: Path) -> Store:
    checkpoint = load_checkpoint(str(model), "tiny", 2, 2)
    store = Store.create(folder, str(model), checkpoint.config, checkpoint.tokenizer_json, *split(checkpoint))
    random_table(store, "root", 1, None, 2000, 1)
    for seed, tenant in enumerate(TENANTS):
        random_tenant(store, tenant, 0.3, seed)
    return store
