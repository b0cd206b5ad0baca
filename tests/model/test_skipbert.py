"""Checkpoints of SkipBERT: both halves give the results of the published forward pass, and a root takes them unchanged."""

import json

import pytest
import torch
import transformers
from torch.nn.functional import layer_norm

from builder.learning.bodies import WholeBody
from builder.learning.limits import Budget
from builder.tables.root import RootOptions, build_root
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.windows import Window
from testing.random_store import SPECIAL, words
from testing.reference import windows_of
from tests.support.message import mentioning, mentions

HIDDEN, HEADS, INNER, SHALLOW, FULL = 24, 3, 40, 2, 3
SIZES = {
    "vocab_size": 90, "hidden_size": HIDDEN, "num_hidden_layers": SHALLOW + FULL, "num_attention_heads": HEADS,
    "intermediate_size": INNER, "max_position_embeddings": 40, "type_vocab_size": 2, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}  # fmt: skip
CONFIG = SIZES | {
    "model_type": "bert", "num_full_hidden_layers": FULL, "shallow_hidden_size": HIDDEN, "shallow_intermediate_size": INNER,
    "plot_mode": "force_compute", "n_gram_left": 1, "n_gram_right": 1,
}  # fmt: skip
OF_SKIPBERT = {
    "attn.weight": (1, HIDDEN), "attn.bias": (1,), "norm.weight": (HIDDEN,), "norm.bias": (HIDDEN,),
    "embeddings.position_embeddings2.weight": (40, HIDDEN), "embeddings.token_type_embeddings2.weight": (2, HIDDEN),
}  # fmt: skip


def published():
    """Returns a BERT, and every tensor of the published model, with random values that reveal mistakes."""
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    tensors = bert.state_dict() | {name: torch.empty(shape) for name, shape in OF_SKIPBERT.items()}
    for name, tensor in tensors.items():
        tensor.normal_(0, 0.3).add_(name.lower().endswith("norm.weight"))
    return bert, tensors


def save(folder, tensors, **changes):
    folder.mkdir()
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *words(90)]) + "\n", "utf-8")
    beside = {"cls.predictions.bias": torch.zeros(90), "fit_denses.0.weight": torch.zeros(32, HIDDEN)}
    torch.save({f"bert.{name}": tensor for name, tensor in tensors.items()} | beside, folder / "pytorch_model.bin")
    return str(folder)


def reference(bert, w, ids, segments):
    """Computes one text as the paper and its code do. Returns the input and the output of the full layers."""

    def through(layers, x):
        for layer in layers:
            x = layer(x[None])[0]
        return x

    merged = torch.zeros(len(ids), HIDDEN)
    for centre in range(len(ids)):
        inside = [i for i in (centre - 1, centre, centre + 1) if 0 <= i < len(ids)]
        places = [i - centre + 1 for i in inside]  # 0, 1, 2 in the tri-gram; a neighbour beyond the text is masked
        x = w["embeddings.word_embeddings.weight"][ids[inside]] + w["embeddings.position_embeddings.weight"][places]
        x = bert.embeddings.LayerNorm(x + w["embeddings.token_type_embeddings.weight"][0])
        x = through(bert.encoder.layer[:SHALLOW], x)
        merged[inside] += x * torch.sigmoid(x @ w["attn.weight"].T + w["attn.bias"])
    merged += w["embeddings.position_embeddings2.weight"][: len(ids)] + w["embeddings.token_type_embeddings2.weight"][segments]
    # this norm has another epsilon than the configuration
    entered = layer_norm(merged, (HIDDEN,), w["norm.weight"], w["norm.bias"], eps=1e-5)
    return entered, through(bert.encoder.layer[SHALLOW:], entered)


@torch.no_grad()
def test_our_halves_equal_skipbert(tmp_path):
    bert, tensors = published()
    checkpoint = load_checkpoint(save(tmp_path / "SkipBERT", tensors))
    assert (checkpoint.config.name, checkpoint.config.lower_layers, checkpoint.config.upper_layers) == ("skipbert", 2, 3)
    assert (checkpoint.config.cls_id, checkpoint.config.sep_id) == (2, 3)
    lower, upper = split(checkpoint)
    lengths = [7, 2, 1, 11]
    ids = torch.randint(1, 90, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = (positions > 3).long()
    windows = windows_of(checkpoint.config.window, [text.tolist() for text in ids.split(lengths)])
    sums = checkpoint.config.window.aggregate(lower(torch.from_numpy(windows)))
    texts = [reference(bert, tensors, *text) for text in zip(ids.split(lengths), segments.split(lengths), strict=True)]
    entered, left = (torch.cat(side) for side in zip(*texts, strict=True))
    assert torch.allclose(upper.enter(sums, positions, segments), entered, atol=1e-5)
    assert torch.allclose(upper(sums, positions, segments, PackedAttention(lengths, HEADS)), left, atol=1e-4)


@pytest.mark.parametrize("minutes, said", [(0.0, False), (10.0, True)])
def test_a_root_takes_both_halves_unchanged(tmp_path, capsys, minutes, said):
    model = save(tmp_path / "SkipBERT", published()[1])
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(" ".join(words(90)[i : i + 6]) for i in range(20)), "utf-8")
    budget, cpu = Budget(minutes=minutes), torch.device("cpu")
    store, table = build_root(model, [corpus], tmp_path / "store", RootOptions(), budget, cpu)
    assert mentions(capsys.readouterr().err, model, "nothing is adapted") == said
    lower, upper = split(load_checkpoint(model))
    for ours, expected in ((store.lower("root", 1), lower), (store.upper(), upper)):
        assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in ours.state_dict().items())
    assert table.meta.keys > 20


MISSING = ("attn.weight", "embeddings.token_type_embeddings2.weight")


@pytest.mark.parametrize(
    "changes, missing, options, named",
    [
        ({"shallow_hidden_size": 48}, (), {}, ["shallow_hidden_size", 48]),
        ({"shallow_hidden_size": None}, (), {}, ["shallow_hidden_size", 768]),
        ({"shallow_intermediate_size": 80}, (), {}, ["shallow_intermediate_size", 80]),
        ({"num_full_hidden_layers": 5}, (), {}, ["num_full_hidden_layers", 5]),
        ({"position_embedding_type": "relative_key"}, (), {}, ["'relative_key'"]),
        ({"num_full_hidden_layers": None}, (), {}, ["config.json", "num_full_hidden_layers", "position_embeddings2"]),
        ({}, MISSING, {}, MISSING),
        ({}, (), {"lower": 3}, [2, 3, "--lower", "--upper"]),
        ({}, (), {"window": Window(5)}, ["--window"]),
    ],
)
def test_unsupported_skipberts_and_other_splits_are_refused(tmp_path, changes, missing, options, named):
    tensors = {name: tensor for name, tensor in published()[1].items() if name not in missing}
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        load_checkpoint(save(tmp_path / "m", tensors, **changes), **options)


def test_it_does_not_learn(tmp_path):
    checkpoint = load_checkpoint(save(tmp_path / "m", published()[1]), lower=2, upper=3)
    with pytest.raises(InvalidInput, match="--minutes 0"):
        WholeBody(checkpoint)
