"""A tiny SkipBERT with published tensor names: our two halves give the results of its own forward pass."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, layer_norm, linear
from transformers import BertConfig, BertModel

from builder.adaptation.learning import Budget
from builder.adaptation.teacher import Teacher
from builder.tables.root import RootOptions, build_root
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.windows import Window
from testing.random_store import SPECIAL, words
from tests.support.message import mentioning, mentions

HIDDEN, HEADS, INNER, SHALLOW, FULL = 24, 3, 40, 2, 3
CONFIG = {
    "model_type": "bert", "vocab_size": 90, "hidden_size": HIDDEN, "num_hidden_layers": SHALLOW + FULL,
    "num_attention_heads": HEADS, "intermediate_size": INNER, "max_position_embeddings": 40, "type_vocab_size": 2,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "num_full_hidden_layers": FULL, "shallow_hidden_size": HIDDEN,
    "shallow_intermediate_size": INNER, "plot_mode": "force_compute", "n_gram_left": 1, "n_gram_right": 1,
}  # fmt: skip


def published(seed=0):
    """Returns every tensor of the published model, with random values that reveal mistakes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"embeddings.{name}.weight": (rows, HIDDEN) for name, rows in (
        ("word_embeddings", 90), ("position_embeddings", 40), ("token_type_embeddings", 2),
        ("position_embeddings2", 40), ("token_type_embeddings2", 2),
    )}  # fmt: skip
    denses = {"attn": (1, HIDDEN), "pooler.dense": (HIDDEN, HIDDEN)}
    norms = ["embeddings.LayerNorm", "norm"]
    for i in range(SHALLOW + FULL):
        at = f"encoder.layer.{i}"
        denses |= {f"{at}.attention.self.{part}": (HIDDEN, HIDDEN) for part in ("query", "key", "value")}
        denses[f"{at}.attention.output.dense"] = (HIDDEN, HIDDEN)
        denses |= {f"{at}.intermediate.dense": (INNER, HIDDEN), f"{at}.output.dense": (HIDDEN, INNER)}
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
    for name, shape in denses.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    shapes |= {f"{name}.{kind}": (HIDDEN,) for name in norms for kind in ("weight", "bias")}
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for name in norms:
        tensors[f"{name}.weight"] += 1
    return tensors


def save(folder, tensors, **changes):
    folder.mkdir()
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *words(90)]) + "\n", "utf-8")
    beside = {"cls.predictions.bias": torch.zeros(90), "fit_denses.0.weight": torch.zeros(32, HIDDEN)}
    torch.save({f"bert.{name}": tensor for name, tensor in tensors.items()} | beside, folder / "pytorch_model.bin")
    return str(folder)


def norm(w, name, x, eps=1e-12):
    return layer_norm(x, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"], eps)


def dense(w, name, x):
    return linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def bert_layer(w, i, x):
    """Runs one layer of BERT on a sequence of tokens that all see each other."""
    at, size = f"encoder.layer.{i}", HIDDEN // HEADS
    q, k, v = (dense(w, f"{at}.attention.self.{part}", x) for part in ("query", "key", "value"))
    heads = [slice(h * size, (h + 1) * size) for h in range(HEADS)]
    seen = torch.cat([torch.softmax(q[:, h] @ k[:, h].T / size**0.5, -1) @ v[:, h] for h in heads], -1)
    x = norm(w, f"{at}.attention.output.LayerNorm", x + dense(w, f"{at}.attention.output.dense", seen))
    inner = gelu(dense(w, f"{at}.intermediate.dense", x))
    return norm(w, f"{at}.output.LayerNorm", x + dense(w, f"{at}.output.dense", inner))


def reference(w, ids, segments):
    """Computes one text as the paper and its code do. Returns the input and the output of the full layers."""
    merged = torch.zeros(len(ids), HIDDEN)
    for centre in range(len(ids)):
        inside = [i for i in (centre - 1, centre, centre + 1) if 0 <= i < len(ids)]
        places = [i - centre + 1 for i in inside]  # 0, 1, 2 in the tri-gram; a neighbour beyond the text is masked
        x = w["embeddings.word_embeddings.weight"][ids[inside]] + w["embeddings.position_embeddings.weight"][places]
        x = norm(w, "embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0])
        for i in range(SHALLOW):
            x = bert_layer(w, i, x)
        merged[inside] += x * torch.sigmoid(dense(w, "attn", x))
    merged += w["embeddings.position_embeddings2.weight"][: len(ids)] + w["embeddings.token_type_embeddings2.weight"][segments]
    entered = x = norm(w, "norm", merged, eps=1e-5)  # this norm has another epsilon than the configuration
    for i in range(SHALLOW, SHALLOW + FULL):
        x = bert_layer(w, i, x)
    return entered, x


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_our_halves_equal_skipbert(tmp_path, seed):
    tensors = published(seed)
    checkpoint = load_checkpoint(save(tmp_path / "SkipBERT", tensors))
    assert (checkpoint.config.name, checkpoint.config.lower_layers, checkpoint.config.upper_layers) == ("skipbert", 2, 3)
    assert (checkpoint.config.cls_id, checkpoint.config.sep_id) == (2, 3)
    lower, upper = split(checkpoint)
    lengths = [7, 2, 1, 11]
    ids = torch.randint(1, 90, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = (positions > 3).long()
    windows = checkpoint.config.window.of(ids.numpy(), np.array(lengths))
    sums = checkpoint.config.window.aggregate(lower(torch.from_numpy(windows)))
    texts = [reference(tensors, *text) for text in zip(ids.split(lengths), segments.split(lengths), strict=True)]
    entered, left = (torch.cat(side) for side in zip(*texts, strict=True))
    assert torch.allclose(upper.enter(sums, positions, segments), entered, atol=1e-5)
    assert torch.allclose(upper(sums, positions, segments, PackedAttention(lengths, HEADS)), left, atol=1e-4)


@pytest.mark.parametrize("minutes, said", [(0.0, False), (10.0, True)])
def test_a_root_takes_both_halves_unchanged(tmp_path, capsys, minutes, said):
    model = save(tmp_path / "SkipBERT", published())
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(" ".join(words(90)[i : i + 6]) for i in range(20)), "utf-8")
    budget, cpu = Budget(minutes=minutes), torch.device("cpu")
    store, table = build_root(model, [corpus], tmp_path / "store", RootOptions(), budget, cpu)
    assert mentions(capsys.readouterr().err, model) == said
    lower, upper = split(load_checkpoint(model))
    for ours, expected in ((store.lower("root", 1), lower), (store.upper(), upper)):
        assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in ours.state_dict().items())
    assert table.meta.keys > 20


def test_a_skipbert_cannot_be_a_teacher(tmp_path):
    with pytest.raises(InvalidInput, match="--minutes 0"):
        Teacher(load_checkpoint(save(tmp_path / "SkipBERT", published())))


def test_missing_tensors_are_named(tmp_path):
    tensors = published()
    del tensors["attn.weight"], tensors["embeddings.token_type_embeddings2.weight"]
    with pytest.raises(InvalidInput, match=mentioning("attn.weight", "embeddings.token_type_embeddings2.weight")):
        load_checkpoint(save(tmp_path / "m", tensors))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"shallow_hidden_size": 48}, ["shallow_hidden_size", 48]),
        ({"shallow_hidden_size": None}, ["shallow_hidden_size", 768]),
        ({"shallow_intermediate_size": 80}, ["shallow_intermediate_size", 80]),
        ({"num_full_hidden_layers": 5}, ["num_full_hidden_layers", 5]),
        ({"position_embedding_type": "relative_key"}, ["'relative_key'"]),
        ({"num_full_hidden_layers": None}, ["config.json", "num_full_hidden_layers", "position_embeddings2"]),
    ],
)
def test_unsupported_skipberts_are_refused(tmp_path, changes, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        load_checkpoint(save(tmp_path / "m", published(), **changes))


def test_options_for_another_split_are_refused(tmp_path):
    model = save(tmp_path / "m", published())
    assert load_checkpoint(model, lower=2, upper=3).config.upper_layers == 3
    with pytest.raises(InvalidInput, match=mentioning(2, 3, "--lower", "--upper")):
        load_checkpoint(model, lower=3)
    with pytest.raises(InvalidInput, match=mentioning("--window", "--causal")):
        load_checkpoint(model, window=Window(5))


def test_a_plain_bert_is_not_taken_for_a_skipbert(tmp_path):
    plain = {name: value for name, value in CONFIG.items() if name != "num_full_hidden_layers"}
    BertModel(BertConfig(**plain)).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "vocab.txt").write_text("\n".join([*SPECIAL, *words(90)]) + "\n", "utf-8")
    assert not load_checkpoint(str(tmp_path / "m")).skipbert
