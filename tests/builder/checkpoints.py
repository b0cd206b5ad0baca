"""Two tiny BERTs, saved as Hugging Face does, and comparisons of weights."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

from testing.random_store import tokenizer_json

VOCABULARY = 90  # of `save_bert`
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
SPLIT = 2  # lower layers of the BERT that the fixtures of imports were trained on
SIZES = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns weights far larger than BERT's, so that a wrong scale or place changes the results."""
    numbers = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.15, shape)
    return torch.from_numpy(numbers.astype(np.float32)) + (1.0 if name.endswith("LayerNorm.weight") else 0.0)


def fill(module: torch.nn.Module) -> None:
    """Sets every parameter by its name, and leaves buffers unchanged."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(drawn(name, tuple(parameter.shape)))


def save_base(folder: Path) -> None:
    """Saves the BERT that every fixture was trained on. Its weights are computed from its tensors' names, and need no file."""
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    fill(model)
    model.save_pretrained(folder)


def save_bert(folder: Path, with_head: bool = False, vocabulary: int = VOCABULARY, positions: int = 40) -> Path:
    """Saves a tiny BERT whose neighbours matter, with its tokenizer, as Hugging Face does."""
    sizes = SIZES | {"vocab_size": vocabulary, "max_position_embeddings": positions, "initializer_range": 0.15}
    torch.manual_seed(0)
    (transformers.BertForMaskedLM if with_head else transformers.BertModel)(transformers.BertConfig(**sizes)).save_pretrained(
        folder
    )
    save_tokenizer(folder, vocabulary)
    return folder


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    (folder / "made.json").write_text(tokenizer_json(vocabulary))
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "made.json"), **SPECIAL).save_pretrained(folder)


def weights(*stacks):
    return {f"{i}.{name}": tensor.clone() for i, stack in enumerate(stacks) for name, tensor in stack.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
