"""Encoders of each family give the states of `transformers`, and the lower stack computes each window as if it were alone."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hplm.errors import InvalidInput
from hplm.model import attention
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import full_stack, load_checkpoint, split
from hplm.model.layer import KEY_VALUE, QKV, QUERY
from hplm.model.stacks import UpperStack, through, turn_of
from hplm.model.tokenizer import Tokenizer
from hplm.model.weights import without_weights
from hplm.model.windows import Window
from hplm.model.word_spans import first_tokens, words_of
from hplm.tasks.tasks import find_task
from testing.random_store import random_backbone
from testing.toy import CONFIG
from tests.support.families import FAMILIES, LENGTH, bytes_of_words, save_family, unigram
from tests.support.message import mentioning

ROTARY = ["eurobert", "modernbert", "nomic_bert"]
SEGMENTS = dict.fromkeys(("camembert", "roberta", "xlm-roberta"), 1) | dict.fromkeys(ROTARY[:2], 0)  # of others 2


@pytest.fixture
def saved(tmp_path):
    def save(family, **changes):
        return str(tmp_path / family), save_family(tmp_path / family, family, **changes)

    return save


@torch.no_grad()
def states(checkpoint, texts):
    """Returns the last states of several texts, which are computed together: by all layers, and then by those of the split."""
    config, weights, lengths = checkpoint.config, checkpoint.weights, [len(one.tokens) for one in texts]
    positions = torch.cat([torch.arange(length) for length in lengths])
    x = weights["words.weight"][np.concatenate([one.tokens for one in texts])]
    if config.has_places:
        x = x + weights["positions.weight"][positions]
    if config.segments:
        x = x + weights["segments.weight"][np.concatenate([one.segments for one in texts]).astype(int)]
    if config.normed_words:
        x = torch.nn.functional.layer_norm(x, x.shape[1:], weights["norm.weight"], weights.get("norm.bias"), config.norm_eps)
    (_, upper), layers = split(checkpoint), full_stack(checkpoint)
    attend, turn = PackedAttention(lengths, config.heads), turn_of(config, positions, x.dtype)
    at_split = through(layers[: config.lower_layers], x, attend, turn=turn)
    for above in (layers[config.lower_layers :], upper.layers):
        yield upper.leave(through(above, at_split, attend, turn=turn)).split(lengths)


def test_a_stack_whose_weights_are_to_come_draws_none(monkeypatch):
    monkeypatch.delattr("torch.nn.init._no_grad_normal_")  # that of embeddings
    with without_weights():
        stack = UpperStack(CONFIG)
    assert all(weight.is_meta for weight in stack.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_states_of_transformers(saved, family):
    folder, stock = saved(family)
    checkpoint = load_checkpoint(folder, lower=1)
    config = checkpoint.config
    assert (config.name, config.lower_layers, config.positions) == (family, 1, LENGTH)
    assert config.segments == SEGMENTS.get(family, 2)
    tokenizer = Tokenizer(checkpoint.tokenizer_json, checkpoint.config.positions)
    given = ("the cat sat", None), ("the cat", "on the mat"), ("the cat " * LENGTH, None)
    texts = [tokenizer.encode(text, pair, truncate=True) for text, pair in given]
    for found in states(checkpoint, texts):
        for encoded, own in zip(texts, found, strict=True):
            expected = states_of_transformers(stock, family, encoded.tokens, encoded.segments)[-1]
            assert torch.allclose(own, expected, atol=1e-4)


@torch.no_grad()
def states_of_transformers(stock, family, tokens, segments=None):
    """Returns the states of one text: those that enter the layers, and those behind each."""
    given = {}
    if segments is not None and family in ("bert", "electra", "nomic_bert"):
        given["token_type_ids"] = torch.tensor([segments.tolist()])
    return [own[0] for own in stock(torch.tensor([tokens.tolist()]), output_hidden_states=True, **given).hidden_states]


@pytest.mark.parametrize("family", ROTARY)
@torch.no_grad()
def test_a_window_that_is_a_whole_text_gives_the_states_of_transformers(saved, family):
    """Layers that turn need to know no position, so that the rows of a table are those of the original."""
    folder, stock = saved(family)
    checkpoint = load_checkpoint(folder, lower=2, window=Window(5))
    tokens = np.array([7, 9, 8, 7, 11])
    lower, _ = split(checkpoint)
    expected = states_of_transformers(stock, family, tokens)[2]
    assert torch.allclose(
        lower(torch.tensor([tokens.tolist()]) + 1)[0], expected * lower.gate_bias.sigmoid()[:, None], atol=1e-4
    )


def test_a_long_text_has_no_mask_of_all_pairs_in_near_layers(saved):
    """Several thousand tokens beside a short text, with and without the compiled kernel."""
    folder, stock = saved("modernbert", max_position_embeddings=4000, local_attention=128)
    checkpoint, rng = load_checkpoint(folder, lower=1), np.random.default_rng(0)
    texts = [SimpleNamespace(tokens=rng.integers(5, 60, length), segments=None) for length in (4000, 40)]
    for found in states(checkpoint, texts):
        for one, own in zip(texts, found, strict=True):
            assert torch.allclose(own, states_of_transformers(stock, "modernbert", one.tokens)[-1], atol=1e-4)
    whole, masks = torch.randn(3, 4000, 32), []
    sdpa = attention.scaled_dot_product_attention
    attended = PackedAttention([4000], 2)(0, *whole, near=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "scaled_dot_product_attention", lambda q, k, v, mask, **more: (
            masks.append(mask.numel()) or sdpa(q, k, v, mask, **more)
        ))  # fmt: skip
        assert torch.allclose(PackedAttention([4000], 2, compiled=False)(0, *whole, near=64), attended, atol=1e-5)
    assert max(masks) < 4000 * 4000 / 100


def test_near_layers_that_are_not_each_nth_are_refused(saved):
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    folder, _ = saved("modernbert", layer_types=kinds)
    with pytest.raises(InvalidInput, match=mentioning("near layers")):
        load_checkpoint(folder)


@torch.no_grad()
def test_queries_of_few_rows_are_computed_alone():
    _, upper = random_backbone(CONFIG)
    layer, x, attend, rows_of = upper.layers[-1], torch.randn(90, CONFIG.hidden), PackedAttention([40, 50], CONFIG.heads), {}

    def adapt(at, before, after):
        rows_of[at] = len(before)
        return after

    expected = layer(x, attend)
    layer.put_query_apart()
    few, most = torch.tensor([0, 40]), torch.arange(1, 90)
    assert torch.allclose(layer.plain()(x, attend, adapt, few), expected[few], atol=1e-5)
    assert (rows_of.pop(QUERY), rows_of.pop(KEY_VALUE)) == (2, 90) and QKV not in rows_of
    assert torch.allclose(layer.plain()(x, attend, adapt, most), expected[most], atol=1e-5)
    assert rows_of.pop(QKV) == 90 and QUERY not in rows_of


def test_layers_between_the_halves_are_taken_from_below(saved):
    folder, stock = saved("bert", num_hidden_layers=6)
    lower, upper = split(load_checkpoint(folder, lower=3, upper=2))
    assert len(lower.layers) == 3 and len(upper.layers) == 2
    assert torch.equal(upper.layers[0].ffn_in.weight, stock.encoder.layer[3].intermediate.dense.weight)


@pytest.mark.parametrize(
    "family, saved_with, config, options, named",
    [
        ("electra", {"embedding_size": 12}, {}, {}, [12, 24, "ELECTRA"]),
        ("roberta", {"is_decoder": True}, {}, {}, ["roberta", "decoder"]),
        ("bert", {"num_hidden_layers": 2}, {"num_hidden_layers": 3}, {}, ["bert", 16]),  # tensors are missing
        ("bert", {}, {"position_embedding_type": "relative_key"}, {}, ["'relative_key'"]),
        *(("bert", {}, {}, {"lower": lower, "upper": upper}, [3, lower, upper]) for lower, upper in ((0, 2), (3, 1), (2, 2))),
        ("bert", {}, {"model_type": "deberta"}, {}, ["'deberta'", "distances", "roberta", "gpt2"]),
        ("bert", {}, {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, {}, ["code of its own", "transformers"]),
    ],
)
def test_what_cannot_be_split_or_computed_is_refused(saved, capsys, family, saved_with, config, options, named):
    folder, _ = saved(family, **saved_with)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        load_checkpoint(folder, **options)
    assert not capsys.readouterr().out, "the library asks at the terminal whether code may run"
    with pytest.raises(InvalidInput, match=mentioning(f"{folder}-nothing")):
        load_checkpoint(f"{folder}-nothing")


@pytest.mark.parametrize("made", [unigram, bytes_of_words])
def test_words_and_passages_keep_their_places_where_spaces_are_in_tokens(made):
    tokenizer = Tokenizer(made()[0], 64)
    text, passage = "a  cat sat ", " the capital of\nFrance"
    encoded = tokenizer.encode(text)
    tokens = first_tokens(encoded, words_of(text))
    assert encoded.offsets[tokens, 0].tolist() == [start for start, _ in words_of(text)]
    rows = find_task("span").find_rows(text, passage, tokenizer.encode(text, passage))
    assert rows[0].tolist() == [0, 0, 0] and (rows[1:, 2] > 0).all()
    assert {passage[start] for _, start, end in rows[1:].tolist() if start < end}.isdisjoint(" \n")
    assert len({*(start for start, _ in words_of(passage))} - {*rows[1:, 1].tolist()}) == 0


def test_windows_have_one_to_five_tokens():
    for n in (0, 6):
        with pytest.raises(InvalidInput, match=mentioning(n, 5)):
            Window(n)


def by_hand(lower, window):
    """Returns the gated vectors of one window, n x hidden."""
    vectors = torch.zeros(len(window), lower.words.embedding_dim)
    here = [i for i, token in enumerate(window) if token]
    x = lower.norm(torch.stack([lower.words.weight[window[i] - 1] + lower.places[i] for i in here]))
    for layer in lower.layers:
        x = layer(x, PackedAttention([len(here)], lower.heads))
    for i, vector in zip(here, x, strict=True):
        vectors[i] = vector * torch.sigmoid((vector * lower.gate[i]).sum() + lower.gate_bias[i])
    return vectors


@torch.no_grad()
def test_each_causal_window_is_computed_as_if_it_were_alone():
    """Of the others, `test_skipbert.py` has the published ones."""
    lower, _ = random_backbone(replace(CONFIG, window=Window(3, causal=True)))
    for parameter in (lower.places, lower.gate, lower.gate_bias):
        parameter.normal_(0, 0.2)
    windows = torch.tensor([[0, 8, 4], [5, 6, 7], [0, 6, 7], [9, 3, 4], [5, 6, 7], [0, 0, 4], [2, 2, 2]])
    expected = torch.stack([by_hand(lower, window) for window in windows.tolist()])[:, lower.window.stored]
    assert torch.allclose(lower(windows), expected, atol=1e-5)
    assert expected.abs().max() > 0.1
