"""A packed model becomes a checkpoint that `transformers` reads."""

import struct

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from hplm.errors import Broken
from research.e5 import EMBEDDINGS, LAYER, MAGIC, convert

HIDDEN, INTERMEDIATE, POSITIONS = 32, 64, 8
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁old", "▁fine", "s", "<mask>"]
GENERATOR = np.random.default_rng(0)


def in_blocks(numbers):
    """Returns numbers in 4 bits, and as they are read again."""
    blocks = numbers.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1) / 7).astype("<f2")
    whole = np.clip(np.rint(blocks / scale[:, None].astype(np.float32)), -8, 7)
    low, high = (whole[:, :16] + 8).astype("u1"), (whole[:, 16:] + 8).astype("u1")
    packed = b"".join(one.tobytes() + pairs.tobytes() for one, pairs in zip(scale, low | high << 4, strict=True))
    return packed, (whole * scale[:, None].astype(np.float32)).reshape(numbers.shape)


def tensors():
    """Yields each tensor's name and shape, and whether it is in blocks."""
    rows = {"emb.word": len(PIECES), "emb.pos": POSITIONS, "emb.type": 2}
    for name in EMBEDDINGS:
        yield name, (rows[name], HIDDEN) if name in rows else (HIDDEN,), name == "emb.word"
    for part in LAYER:
        outputs, inputs = {"fi": (INTERMEDIATE, HIDDEN), "fo": (HIDDEN, INTERMEDIATE)}.get(part, (HIDDEN, HIDDEN))
        is_norm = part.endswith("ln")
        yield f"l0.{part}.w", (HIDDEN,) if is_norm else (outputs, inputs), not is_norm
        yield f"l0.{part}.b", (outputs,), False


@pytest.fixture(scope="module")
def packed():
    """A packed model, and its numbers by their names."""
    known, directory, content = {}, b"", b""
    blob = "".join(PIECES).encode()
    places = np.cumsum([0, *(len(piece.encode()) for piece in PIECES)]).astype("<u4")
    head = MAGIC + struct.pack("<7ifi", HIDDEN, 1, 2, INTERMEDIATE, len(PIECES), POSITIONS, 2, 1e-12, 32)
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, len(blob))
    head += places.tobytes() + np.array([0, 0, 0, 0, -3, -1, -1, -2, 0], "<f4").tobytes() + blob
    head += struct.pack("<iI", 1, 5) + b"\1\0\0\0\0"  # a table of one code point, which becomes nothing
    described = list(tensors())
    begin = len(head) + 4 + sum(2 + len(name) + 21 for name, _, _ in described)
    for name, shape, is_packed in described:
        numbers = GENERATOR.standard_normal(shape, np.float32)
        own, known[name] = in_blocks(numbers) if is_packed else (numbers.tobytes(), numbers)
        directory += struct.pack(f"<H{len(name)}s?IQQ", len(name), name.encode(), is_packed, numbers.size, begin, len(own))
        begin, content = begin + len(own), content + own
    return head + struct.pack("<i", len(described)) + directory + content, known


def test_a_packed_model_becomes_a_checkpoint(packed, tmp_path):
    content, known = packed
    convert(content, tmp_path)
    model, tokenizer = AutoModel.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    found = model.state_dict()
    for name, there in {
        "emb.word": "embeddings.word_embeddings.weight",
        "emb.pos": "embeddings.position_embeddings.weight",
        "l0.k.w": "encoder.layer.0.attention.self.key.weight",
        "l0.fi.b": "encoder.layer.0.intermediate.dense.bias",
        "l0.fo.w": "encoder.layer.0.output.dense.weight",
        "l0.oln.w": "encoder.layer.0.output.LayerNorm.weight",
    }.items():
        np.testing.assert_array_equal(found[there].numpy(), known[name])
    assert not [name for name in found if torch.isnan(found[name]).any()]
    assert tokenizer("ﬁnes\told").tokens() == ["<s>", "▁fine", "s", "▁old", "</s>"]
    assert model.config.pad_token_id == tokenizer.pad_token_id == 1 and tokenizer.mask_token == "<mask>"


def test_another_file_is_refused(tmp_path):
    with pytest.raises(Broken, match="no packed model"):
        convert(b"GGUF", tmp_path)
