"""Tiny random encoders of each family, saved as `transformers` does, each with a tokenizer of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from testing.random_store import tokenizer_json

SENTENCES = ("the cat sat on the mat", "a dog ran to the cat", "Paris is the capital of France")
ROBERTAS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
LENGTH = 20  # positions
SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 40}
DISTIL = {"dim": 24, "n_layers": 3, "n_heads": 3, "hidden_dim": 40}


def unigram():
    """As XLM-R's: the space before a word is a part of its first token, or a token of its own."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=list(ROBERTAS), unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    special = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=special
    )
    return tokenizer.to_str(), ROBERTAS


def bytes_of_words():
    """As RoBERTa's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(ROBERTAS), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer.to_str(), ROBERTAS


def word_pieces():
    return tokenizer_json(90), ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")


ROTARY = SIZES | {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "max_position_embeddings": LENGTH}
NEAR = 3  # tokens to each side
FAMILIES = {  # the name of its classes, its tokenizer, and its sizes
    "bert": ("Bert", word_pieces, SIZES),
    "camembert": ("Camembert", unigram, SIZES | {"type_vocab_size": 1}),
    "distilbert": ("DistilBert", word_pieces, DISTIL),
    "electra": ("Electra", word_pieces, SIZES | {"embedding_size": 24}),
    "eurobert": ("EuroBert", bytes_of_words, ROTARY | {"num_key_value_heads": 2, "classifier_pooling": "bos"}),
    "modernbert": ("ModernBert", bytes_of_words, ROTARY | {"local_attention": 2 * NEAR}),
    "nomic_bert": ("NomicBert", word_pieces, ROTARY),
    "roberta": ("Roberta", bytes_of_words, SIZES | {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", unigram, SIZES | {"type_vocab_size": 1}),
}


def save_family(folder: Path, family: str, ending: str = "Model", **changes: Any) -> Any:
    """Saves a model of a family, and returns it. `ending`: of its class, such as `ForSequenceClassification`."""
    name, made, sizes = FAMILIES[family]
    text, special = made()
    tokenizer = Tokenizer.from_str(text)
    names = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), special, strict=True))
    own = {
        "max_position_embeddings": LENGTH + (2 if made is not word_pieces else 0),
        "pad_token_id": int(special == ROBERTAS),
    }
    config = getattr(transformers, f"{name}Config")(vocab_size=tokenizer.get_vocab_size(), **(own | sizes | changes))
    torch.manual_seed(0)
    made_model = getattr(transformers, name + ending)(config).eval()
    for parameter in made_model.parameters():
        parameter.data.normal_(0, 0.3)
    made_model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return made_model
