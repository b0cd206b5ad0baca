"""A tiny BERT saved by Hugging Face."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from tests.builder.checkpoints import SIZES, save_tokenizer


def save_bert(folder: Path) -> BertModel:
    torch.manual_seed(3)
    model = BertModel(BertConfig(**SIZES, initializer_range=0.2), add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, 200)
    return model
