"""A tiny BERT whose neighbours matter, and documents whose words can be guessed."""

import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedTokenizerFast

from testing.random_store import random_documents, tokenizer_json

CPU = torch.device("cpu")
VOCABULARY = 90


def save(folder, model):
    """Saves a BERT. `model`: "with head", or without one."""
    (folder / "made.json").write_text(tokenizer_json(VOCABULARY))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=40, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    (BertForMaskedLM if model == "with head" else BertModel)(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "made.json"), **special).save_pretrained(folder)
    return folder


def chained(config, tokens, length, seed):
    """Each word determines the next one, so that masked words can be predicted."""
    documents = random_documents(config, tokens, length, seed)
    for document in documents:
        for place in range(2, length - 1):
            document[place] = 5 + (document[place - 1] * 7 + 3) % (VOCABULARY - 5)
    return documents


def weights(*stacks):
    return {f"{i}.{name}": tensor.clone() for i, stack in enumerate(stacks) for name, tensor in stack.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
