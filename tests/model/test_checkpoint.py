"""Checkpoints of Hugging Face: BERT, and a tiny SkipBERT whose halves give the results of its own forward pass."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, layer_norm, linear
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel

from builder.learning.limits import Budget
from builder.learning.teacher import Teacher
from builder.tables.root import RootOptions, build_root
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import full_stack, load_checkpoint, split
from hplm.model.windows import Window
from testing.random_store import SPECIAL, words
from tests.builder.checkpoints import save_tokenizer
from tests.support.message import mentioning, mentions


def _config(layers=5, **changes):
    return BertConfig(
        vocab_size=90, hidden_size=24, num_hidden_layers=layers, num_attention_heads=3, intermediate_size=40, **changes
    )


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM])
@pytest.mark.parametrize("file", ["safetensors", "bin"])
def test_the_teacher_equals_transformers(tmp_path, kind, file):
    folder = tmp_path / "My-BERT"
    model = kind(_config()).eval()
    model.save_pretrained(folder)
    if file == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    save_tokenizer(folder, 90)
    checkpoint = load_checkpoint(str(folder), lower=2)
    assert (checkpoint.config.name, checkpoint.config.lower_layers, checkpoint.config.upper_layers) == ("my-bert", 2, 3)
    assert (checkpoint.config.cls_id, checkpoint.config.sep_id) == (2, 3)

    stock = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    ids = torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = stock(ids, output_hidden_states=True)
        x, attend = expected.hidden_states[0][0], PackedAttention([9], 3)
        for layer in full_stack(checkpoint):
            x = layer(x, attend)
    assert torch.allclose(x, expected.last_hidden_state[0], atol=1e-5)


def test_layers_between_the_halves_are_taken_from_below(tmp_path):
    model = BertModel(_config(6))
    model.save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m", 90)
    lower, upper = split(load_checkpoint(str(tmp_path / "m"), lower=3, upper=2))
    assert len(lower.layers) == 3 and len(upper.layers) == 2
    assert torch.equal(upper.layers[0].ffn_in.weight, model.encoder.layer[3].intermediate.dense.weight)


@pytest.mark.parametrize(
    "saved, config, options, named",
    [
        (2, {"num_hidden_layers": 3}, {}, ["m", 16]),  # tensors are missing
        (5, {"position_embedding_type": "relative_key"}, {}, ["'relative_key'"]),
        *((5, {}, {"lower": lower, "upper": upper}, [5, lower, upper]) for lower, upper in ((0, 2), (5, 1), (3, 3))),
        (5, {"model_type": "deberta"}, {}, ["'deberta'", "roberta", "gpt2"]),
    ],
)
def test_what_cannot_be_split_or_computed_is_refused(tmp_path, saved, config, options, named):
    BertModel(_config(saved)).save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m", 90)
    path = tmp_path / "m/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        load_checkpoint(str(tmp_path / "m"), **options)
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "nothing")):
        load_checkpoint(str(tmp_path / "nothing"))


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


@pytest.mark.parametrize("seed", range(2))
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


def test_missing_tensors_and_another_use_are_refused(tmp_path):
    tensors = published()
    model = save(tmp_path / "whole", tensors)
    for name in (missing := ("attn.weight", "embeddings.token_type_embeddings2.weight")):
        del tensors[name]
    with pytest.raises(InvalidInput, match=mentioning(*missing)):
        load_checkpoint(save(tmp_path / "m", tensors))
    with pytest.raises(InvalidInput, match=mentioning(2, 3, "--lower", "--upper")):
        load_checkpoint(model, lower=3)
    with pytest.raises(InvalidInput, match=mentioning("--window", "--causal")):
        load_checkpoint(model, window=Window(5))
    with pytest.raises(InvalidInput, match="--minutes 0"):
        Teacher(load_checkpoint(model, lower=2, upper=3))
