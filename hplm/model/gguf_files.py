"""Reads a decoder of the llama architecture from one `.gguf` file: its form, its weights and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HuggingFaceTokenizer
from torch import Tensor

from hplm.errors import InvalidInput
from hplm.model.config import RMS
from hplm.model.layer import ATTENTION_OUT, FFN_IN, FFN_OUT, QKV
from hplm.model.tensors import tensor_of

SUFFIX = ".gguf"
ARCHITECTURE = "llama"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens
PARTS = {  # our names of a layer's tensors -> those in the file, which are joined
    f"{QKV}.weight": ("attn_q", "attn_k", "attn_v"),
    f"{ATTENTION_OUT}.weight": ("attn_output",),
    "attention_norm.weight": ("attn_norm",),
    f"{FFN_IN}.weight": ("ffn_gate", "ffn_up"),
    f"{FFN_OUT}.weight": ("ffn_down",),
    "ffn_norm.weight": ("ffn_norm",),
}
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITTING: dict[str, Any] = {  # how text becomes words, by the file's name for it
    "gpt-2": GPT2_WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_WORDS]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), BYTES]),
}
WHOLE_WORDS = ("llama-bpe",)  # a word that is a token is not merged
SAMPLE = "Hello, World! 3.14 naïve façade — 水は 🙂👩‍👩‍👧\n\n\tdef f(x):\r\n    return x  # ok  "


@dataclass(frozen=True)
class GgufModel:
    form: dict[str, Any]  # fields of `BackboneConfig`
    layers: int
    weights: dict[str, Tensor]  # with our names (`hplm.model.decoders`)
    tokenizer_json: str


def is_gguf(model: str) -> bool:
    return model.lower().endswith(SUFFIX)


def read_gguf(path: Path) -> GgufModel:
    try:
        library: Any = import_module("gguf")  # it has few types
    except ImportError:
        raise InvalidInput(f"reading {path} needs the package gguf: run `pip install gguf`") from None
    if not path.is_file():
        raise InvalidInput(f"{path} does not exist: give --model the path of a {SUFFIX} file")
    try:
        file = _File(path, library.GGUFReader(path), library.dequantize)
    except Exception as error:  # the library raises anything at a damaged file
        raise InvalidInput(f"cannot read {path} as {SUFFIX} ({_first_line(error)}): download it again") from error
    if (found := file.word("general.architecture")) != ARCHITECTURE:
        raise InvalidInput(f"{path} is a {found!r} model, but hPLMs read {SUFFIX} files of the {ARCHITECTURE!r} architecture")
    try:
        form, layers = _form(file), file.number("llama.block_count")
        weights = _weights(file, layers, form["heads"], form["kv_heads"])
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(f"cannot read the weights of {path} ({_first_line(error)}): download it again") from error
    return GgufModel(form, layers, weights, _tokenizer(file))


class _File:
    """The fields and tensors of a file."""

    def __init__(self, path: Path, reader: Any, dequantize: Any) -> None:
        self.path = path
        self._fields = {str(name): field for name, field in reader.fields.items()}
        self._tensors = {str(tensor.name): tensor for tensor in reader.tensors}
        self._dequantize = dequantize

    def find(self, name: str, otherwise: Any = None) -> Any:
        return self._fields[name].contents() if name in self._fields else otherwise

    def _given(self, name: str) -> Any:
        if name not in self._fields:
            raise InvalidInput(f"{self.path} lacks {name!r}: download it again, or take another file")
        return self.find(name)

    def number(self, name: str) -> int:
        return int(self._given(name))

    def word(self, name: str) -> str:
        return str(self._given(name))

    def items(self, name: str) -> Sequence[Any]:
        return self._given(name)

    def has_tensor(self, name: str) -> bool:
        return f"{name}.weight" in self._tensors

    def tensors(self) -> set[str]:
        return set(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """Returns fp32, whatever the file stores."""
        found = self._tensors.get(f"{name}.weight")
        if found is None:
            raise InvalidInput(f"{self.path} lacks the tensor '{name}.weight': take a complete file")
        return tensor_of(np.array(self._dequantize(found.data, found.tensor_type), dtype=np.float32))  # not the mapped file


def _form(file: _File) -> dict[str, Any]:
    hidden, heads = file.number("llama.embedding_length"), file.number("llama.attention.head_count")
    head = int(file.find("llama.attention.key_length", hidden // heads))
    if (scaled := file.find("llama.rope.scaling.type", "none")) != "none" or file.has_tensor("rope_freqs"):
        raise InvalidInput(f"{file.path} has positions scaled by {scaled!r}, which hPLMs cannot compute: take another file")
    if (turned := file.find("llama.rope.dimension_count", head)) != head:
        raise InvalidInput(f"{file.path} rotates {turned} of {head} numbers of a head, but hPLMs rotate all: take another file")
    ends = dict.fromkeys(file.find(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return {
        "vocabulary": len(file.items("tokenizer.ggml.tokens")),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": int(file.find("llama.attention.head_count_kv", heads)),
        "head": head,
        "intermediate": file.number("llama.feed_forward_length"),
        "positions": file.number("llama.context_length"),
        "activation": "silu",
        "norm": RMS,
        "norm_eps": float(file.find("llama.attention.layer_norm_rms_epsilon", 1e-5)),
        "pre_norm": True,
        "biases": False,
        "gated": True,
        "rotary_base": float(file.find("llama.rope.freq_base", 10_000)),
        "start_id": file.number("tokenizer.ggml.bos_token_id"),
        "end_ids": tuple(int(end) for end in ends if end is not None),
        "chat_template": file.find("tokenizer.chat_template"),
    }


def _weights(file: _File, layers: int, heads: int, kv_heads: int) -> dict[str, Tensor]:
    biases = [name for name in file.tensors() if name.endswith(".bias")]
    if biases:
        raise InvalidInput(f"{file.path} has biases ({biases[0]!r}), which a llama of hPLMs lacks: take another file")
    words = file.tensor("token_embd")
    weights = {"words.weight": words, "final_norm.weight": file.tensor("output_norm")}
    weights["next_token.weight"] = file.tensor("output") if file.has_tensor("output") else words
    turned = {"attn_q": heads, "attn_k": kv_heads}
    for number in range(layers):
        for ours, names in PARTS.items():
            parts = [(name, file.tensor(f"blk.{number}.{name}")) for name in names]
            weights[f"layers.{number}.{ours}"] = torch.cat(
                [_halves(part, turned[name]) if name in turned else part for name, part in parts]
            )
    return weights


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Puts the rows of a head that are rotated together half a head apart, as in Hugging Face's models.

    In the file they are neighbours.
    """
    outputs, inputs = weight.shape
    return weight.view(heads, outputs // heads // 2, 2, inputs).transpose(1, 2).reshape(outputs, inputs)


def _tokenizer(file: _File) -> str:
    """Makes the tokenizer from the file's tokens and merges, and checks that texts come back from it."""
    kind, splitting = file.word("tokenizer.ggml.model"), str(file.find("tokenizer.ggml.pre", "gpt-2"))
    if kind != "gpt2" or splitting not in SPLITTING:
        raise InvalidInput(
            f"{file.path} has a tokenizer of kind {kind!r} that splits words as {splitting!r}, but hPLMs read 'gpt2' with "
            f"{', '.join(map(repr, SPLITTING))}: convert its Hugging Face folder instead"
        )
    tokens: list[str] = list(file.items("tokenizer.ggml.tokens"))
    kinds = list(file.find("tokenizer.ggml.token_type", [NORMAL] * len(tokens)))
    try:
        merges = [_pair(merge) for merge in file.items("tokenizer.ggml.merges")]
        model = models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=splitting in WHOLE_WORDS)
        tokenizer = HuggingFaceTokenizer(model)
    except Exception as error:  # the library raises no narrower type
        raise InvalidInput(
            f"{file.path} has tokens and merges that do not fit ({_first_line(error)}): download it again"
        ) from error
    tokenizer.pre_tokenizer = SPLITTING[splitting]
    tokenizer.decoder = decoders.ByteLevel()
    adding = cast(Any, tokenizer)  # its stub leaves the type of tokens open
    for kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        whole = [token for token, its in zip(tokens, kinds, strict=True) if its == kind]
        adding.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in whole])
    known = [tokenizer.decode([i]) for i, kind in enumerate(kinds) if kind == NORMAL]
    for text in (SAMPLE, *(text for text in known if text and "\ufffd" not in text)):
        if tokenizer.decode(tokenizer.encode(text).ids) != text:
            raise InvalidInput(f"{file.path}: the text {text!r} does not come back from its tokens: download the file again")
    return tokenizer.to_str()


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
