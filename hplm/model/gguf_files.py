"""Reads a decoder, a llama or a Qwen, from one `.gguf` file: its form, its weights and its tokenizer."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from unicodedata import normalize

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HuggingFaceTokenizer
from torch import Tensor

from hplm.errors import InvalidInput
from hplm.model.config import RMS
from hplm.model.families import PartNames
from hplm.model.layer import ATTENTION_OUT, FFN_IN, FFN_OUT, QKV
from hplm.model.tensors import tensor_of

SUFFIX = ".gguf"
HEADS, KV_HEADS = "attention.head_count", "attention.head_count_kv"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens
NAMES = PartNames(
    body={"words": "token_embd", "final_norm": "output_norm"},
    layers="blk",
    layer={
        QKV: ["attn_q", "attn_k", "attn_v"],
        ATTENTION_OUT: ["attn_output"],
        "attention_norm": ["attn_norm"],
        FFN_IN: ["ffn_gate", "ffn_up"],
        FFN_OUT: ["ffn_down"],
        "ffn_norm": ["ffn_norm"],
    },
)
QWEN3 = replace(NAMES, layer={**NAMES.layer, "query_norm": ["attn_q_norm"], "key_norm": ["attn_k_norm"]})
ARCHITECTURES = {"llama": NAMES, "qwen2": NAMES, "qwen3": QWEN3}
TURNED = ("llama",)  # whose files have side by side what is rotated together
BIASED = {"qwen2": tuple(f"attn_{part}.bias" for part in "qkv")}
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
SINGLE_DIGITS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITTING: dict[str, Any] = {  # how text becomes words, by the file's name for it
    "gpt-2": GPT2_WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_WORDS]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), BYTES]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SINGLE_DIGITS), "isolated"), BYTES]),
}
COMPOSED = ("qwen2",)  # a letter and its accents become one character; as in transformers
WHOLE_WORDS = ("llama-bpe",)  # a word that is a token is not merged
STARTING = ("llama-bpe",)  # the start id begins a text, in a file that says nothing of it; as in llama.cpp
SAMPLE = "Hello, World! 3.14 naïve façade — 水は 🙂👩‍👩‍👧\n\n\tdef f(x):\r\n    return x  # ok  "


def is_gguf(model: str) -> bool:
    return model.lower().endswith(SUFFIX)


def read_gguf(path: Path) -> tuple[dict[str, Any], int, dict[str, Tensor], str]:
    """Returns the fields of `BackboneConfig`, the number of layers, their weights with our names, and the tokenizer in JSON."""
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
    if (kind := file.architecture) not in ARCHITECTURES:
        raise InvalidInput(
            f"{path} is a {kind!r} model, but hPLMs read {SUFFIX} files of the architectures {', '.join(ARCHITECTURES)}"
        )
    try:
        form, layers = _form(file), int(file.own("block_count"))
        known = BIASED.get(kind, ())
        if biases := [name for name in file.tensors if name.endswith(".bias") and not name.endswith(known)]:
            raise InvalidInput(f"{path} has biases ({biases[0]!r}), which a {kind} of hPLMs lacks: take another file")
        weights = ARCHITECTURES[kind].ours(file, layers)
        weights["next_token.weight"] = file["output.weight"] if "output.weight" in file else weights["words.weight"]
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(f"cannot read the weights of {path} ({_first_line(error)}): download it again") from error
    return form, layers, weights, _tokenizer(file)


class _File(dict[str, Tensor]):
    """The fields of a file, and by their names its weights, which are read when they are asked for."""

    def __init__(self, path: Path, reader: Any, dequantize: Any) -> None:
        super().__init__()
        self.path = path
        self._fields = {str(name): field for name, field in reader.fields.items()}
        self.tensors = {str(tensor.name): tensor for tensor in reader.tensors}
        self._dequantize = dequantize
        self.architecture = str(self.given("general.architecture"))

    def find(self, name: str, otherwise: Any = None) -> Any:
        return self._fields[name].contents() if name in self._fields else otherwise

    def given(self, name: str) -> Any:
        if name not in self._fields:
            raise InvalidInput(f"{self.path} lacks {name!r}: download it again, or take another file")
        return self.find(name)

    def own(self, name: str, *otherwise: Any) -> Any:
        """Returns a field of the file's architecture."""
        return self.find(f"{self.architecture}.{name}", *otherwise) if otherwise else self.given(f"{self.architecture}.{name}")

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __missing__(self, name: str) -> Tensor:
        """Returns a tensor in fp32, whatever the file stores."""
        found = self.tensors.get(name)
        if found is None:
            raise InvalidInput(f"{self.path} lacks the tensor {name!r}: take a complete file")
        tensor = tensor_of(np.array(self._dequantize(found.data, found.tensor_type), dtype=np.float32))  # not the mapped file
        heads = self.own(HEADS)
        if self.architecture not in TURNED or not name.endswith(("attn_q.weight", "attn_k.weight")):
            return tensor
        return _halves(tensor, int(heads if name.endswith("attn_q.weight") else self.own(KV_HEADS, heads)))


def _form(file: _File) -> dict[str, Any]:
    hidden, heads = int(file.own("embedding_length")), int(file.own(HEADS))
    head = int(file.own("attention.key_length", hidden // heads))
    if (scaled := file.own("rope.scaling.type", "none")) != "none" or "rope_freqs.weight" in file.tensors:
        raise InvalidInput(f"{file.path} has positions scaled by {scaled!r}, which hPLMs cannot compute: take another file")
    if (turned := file.own("rope.dimension_count", head)) != head:
        raise InvalidInput(f"{file.path} rotates {turned} of {head} numbers of a head, but hPLMs rotate all: take another file")
    splitting = file.find("tokenizer.ggml.pre")
    ends = dict.fromkeys(file.find(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return {
        "vocabulary": len(file.given("tokenizer.ggml.tokens")),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": int(file.own(KV_HEADS, heads)),
        "head": head,
        "intermediate": int(file.own("feed_forward_length")),
        "positions": int(file.own("context_length")),
        "activation": "silu",
        "norm": RMS,
        "norm_eps": float(file.own("attention.layer_norm_rms_epsilon", 1e-5)),
        "pre_norm": True,
        "biases": file.architecture in BIASED and (QKV,),
        "head_norms": ARCHITECTURES[file.architecture] is QWEN3,
        "gated": True,
        "rotary_base": float(file.own("rope.freq_base", 10_000)),
        "start_id": int(file.given("tokenizer.ggml.bos_token_id")),
        "starts": bool(file.find("tokenizer.ggml.add_bos_token", splitting in STARTING)),
        "end_ids": tuple(int(end) for end in ends if end is not None),
        "chat_template": file.find("tokenizer.chat_template"),
    }


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Puts the rows of a head that are rotated together half a head apart, as in Hugging Face's models.

    In the file they are neighbours.
    """
    outputs, inputs = weight.shape
    return weight.view(heads, outputs // heads // 2, 2, inputs).transpose(1, 2).reshape(outputs, inputs)


def _tokenizer(file: _File) -> str:
    """Makes the tokenizer from the file's tokens and merges, and checks that texts come back from it."""
    kind, splitting = str(file.given("tokenizer.ggml.model")), str(file.find("tokenizer.ggml.pre", "gpt-2"))
    if kind != "gpt2" or splitting not in SPLITTING:
        raise InvalidInput(
            f"{file.path} has a tokenizer of kind {kind!r} that splits words as {splitting!r}, but hPLMs read 'gpt2' with "
            f"{', '.join(map(repr, SPLITTING))}: convert its Hugging Face folder instead"
        )
    tokens: list[str] = list(file.given("tokenizer.ggml.tokens"))
    kinds = list(file.find("tokenizer.ggml.token_type", [NORMAL] * len(tokens)))
    try:
        merges = [cast("tuple[str, str]", merge.partition(" ")[::2]) for merge in file.given("tokenizer.ggml.merges")]
        model = models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=splitting in WHOLE_WORDS)
        tokenizer = HuggingFaceTokenizer(model)
    except Exception as error:  # the library raises no narrower type
        raise InvalidInput(
            f"{file.path} has tokens and merges that do not fit ({_first_line(error)}): download it again"
        ) from error
    if splitting in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITTING[splitting]
    tokenizer.decoder = decoders.ByteLevel()
    adding = cast(Any, tokenizer)  # its stub leaves the type of tokens open
    for kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        whole = [token for token, its in zip(tokens, kinds, strict=True) if its == kind]
        adding.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in whole])
    known = [tokenizer.decode([i]) for i, kind in enumerate(kinds) if kind == NORMAL]
    for text in (SAMPLE, *(text for text in known if text and "\ufffd" not in text)):
        text = normalize("NFC", text) if splitting in COMPOSED else text
        if tokenizer.decode(tokenizer.encode(text).ids) != text:
            raise InvalidInput(f"{file.path}: the text {text!r} does not come back from its tokens: download the file again")
    return tokenizer.to_str()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
