"""Decoders of Hugging Face: whole, and split into a lower stack on windows and an upper stack."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaModel

from hplm.adapters.layout import adapter_layout
from hplm.adapters.tiles import Tiles
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import full_stack, load_checkpoint, split
from hplm.model.config import BackboneConfig
from hplm.model.eightbit import to_eight_bits
from hplm.model.windows import Window
from tests.model.decoders import END, LAYERS, MADE, START, VOCABULARY, drawn, gpt2, llama, opt, saved, tokens
from tests.support.message import mentioning

LOWER, N = 2, 3


@pytest.fixture(scope="module", params=MADE)
def model(request):
    return drawn(MADE[request.param]())


@pytest.fixture
def folder(model, tmp_path):
    return saved(model, tmp_path / "Tiny")


def upper_logits(upper, sums, start=0, adapters=None):
    positions = torch.arange(start, start + len(sums))
    attend = PackedAttention([len(sums)], upper.config.heads, causal=True)
    return upper.logits(upper(sums, positions, None, attend, adapters))


def windows_of(text, n):
    """Returns the window of each token, id + 1."""
    return torch.tensor([[0 if i < 0 else text[i] + 1 for i in range(at - n + 1, at + 1)] for at in range(len(text))])


@torch.no_grad()
def test_a_whole_decoder_has_the_logits_of_transformers(model, folder):
    checkpoint = load_checkpoint(folder, lower=0, window=Window(1))
    config, text = checkpoint.config, tokens(40)
    assert (config.name, config.is_decoder, config.start_id, config.end_ids) == ("tiny", True, START, (END,))
    assert (config.lower_layers, config.upper_layers, config.window) == (0, LAYERS, Window(1, causal=True))
    lower, upper = split(checkpoint)
    words = lower(windows_of(text, 1))[:, 0]
    assert torch.allclose(words, model.get_input_embeddings().weight[text], atol=1e-6)
    expected = model(torch.tensor([text])).logits[0]
    assert torch.allclose(upper_logits(upper, words), expected, atol=1e-4) and expected.std() > 0.5


@torch.no_grad()
def test_a_window_is_computed_as_a_text_behind_the_start_id(model, folder):
    """With what the upper stack adds at its position, it is the hidden state of the last token of that short text."""
    lower, upper = split(load_checkpoint(folder, lower=LOWER, window=Window(N)))
    texts = [tokens(length, seed) for seed, length in enumerate((3, 2, 1, 0, 3))]
    windows = torch.tensor([[0] * (N - len(text[1:])) + [token + 1 for token in text[1:]] for text in texts if text[1:]])
    with_start = torch.tensor([[0, 0, START + 1], [0, START + 1, 8], [START + 1, 5, 6]])
    texts = [text for text in texts if text[1:]] + [[START], [START, 7], [START, 4, 5]]
    vectors = lower(torch.cat([windows, with_start]))
    assert vectors.shape == (len(texts), 1, upper.config.hidden)
    for text, vector in zip(texts, vectors, strict=True):
        expected = model(torch.tensor([text]), output_hidden_states=True).hidden_states[LOWER][0, -1]
        assert torch.allclose(upper.enter(vector, torch.tensor([len(text) - 1]))[0], expected, atol=1e-4)


@torch.no_grad()
def test_a_split_decoder_has_the_same_logits_while_its_windows_see_everything(model, folder):
    lower, upper = split(load_checkpoint(folder, lower=LOWER, window=Window(5)))
    text = tokens(5)
    found, expected = upper_logits(upper, lower(windows_of(text, 5))[:, 0]), model(torch.tensor([text])).logits[0]
    assert torch.allclose(found, expected, atol=1e-4)
    longer = tokens(12)
    found = upper_logits(upper, lower(windows_of(longer, 5))[:, 0])
    assert not torch.allclose(found, model(torch.tensor([longer])).logits[0], atol=0.1)


@torch.no_grad()
def test_a_token_changes_no_logit_before_it(folder):
    lower, upper = split(load_checkpoint(folder, lower=LOWER, window=Window(N)))
    text = tokens(12)
    before = upper_logits(upper, lower(windows_of(text, N))[:, 0])
    changed = [*text[:7], 3, *text[8:]]
    after = upper_logits(upper, lower(windows_of(changed, N))[:, 0])
    assert torch.equal(before[:7], after[:7]) and not torch.allclose(before[7:], after[7:], atol=0.1)


@torch.no_grad()
def test_texts_that_are_packed_together_do_not_see_each_other(folder):
    lower, upper = split(load_checkpoint(folder, lower=0, window=Window(1)))
    texts = [tokens(9, 1), tokens(9, 2), tokens(4, 3)]
    alone = [upper_logits(upper, lower(windows_of(text, 1))[:, 0]) for text in texts]
    sums = torch.cat([lower(windows_of(text, 1))[:, 0] for text in texts])
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    attend = PackedAttention([len(text) for text in texts], upper.config.heads, causal=True)
    rows = torch.tensor([9, 23, 24])
    assert torch.allclose(upper.logits(upper(sums, positions, None, attend)), torch.cat(alone), atol=1e-4)
    assert torch.allclose(upper.logits(upper(sums, positions, None, attend, None, rows)), torch.cat(alone)[rows], atol=1e-4)


@torch.no_grad()
def test_an_adapter_on_every_projection_is_a_change_of_the_weights(model, folder):
    """The widths of queries and keys differ, and a gate is computed beside the inner projection."""
    checkpoint = load_checkpoint(folder, lower=0, window=Window(1))
    (lower, upper), (_, changed) = split(checkpoint), split(checkpoint)
    layout = adapter_layout(checkpoint.config, "lora", 2, ())
    layout = replace(layout, places=tuple(layout.projections))
    generator, text = torch.Generator().manual_seed(0), tokens(9)
    groups = Tiles(torch.zeros(len(text), dtype=torch.int64).numpy(), torch.device("cpu"))
    adapters = []
    for layer in changed.layers:
        weights = {name: 0.2 * torch.randn(1, *shape, generator=generator) for name, shape in layout.shapes.items()}
        adapters.append(lambda at, before, after, weights=weights: layout.adapt(at, before, after, groups, weights))
        for place, at in layout.projections.items():
            getattr(layer, at).weight[layout.outputs(place)] += weights[f"{place}/b"][0] @ weights[f"{place}/a"][0]
    words = lower(windows_of(text, 1))[:, 0]
    adapted = upper_logits(upper, words, adapters=adapters)
    assert torch.allclose(adapted, upper_logits(changed, words), atol=1e-3)
    assert not torch.allclose(adapted, upper_logits(upper, words), atol=0.1)


@torch.no_grad()
def test_products_in_eight_bits_are_close(folder):
    (lower, upper), (_, rounded) = (split(load_checkpoint(folder, lower=0, window=Window(1))) for _ in range(2))
    to_eight_bits(rounded.layers)
    words = lower(windows_of(tokens(20), 1))[:, 0]
    exact, close = upper_logits(upper, words), upper_logits(rounded, words)
    assert 1e-6 < (exact - close).norm() / exact.norm() < 0.2


def test_a_configuration_is_read_as_it_was_saved(folder, tmp_path):
    config = load_checkpoint(folder, lower=LOWER).config
    config.save(tmp_path / "backbone.json")
    assert BackboneConfig.load(tmp_path / "backbone.json") == config


def test_a_decoder_learns_nothing_yet(folder):
    with pytest.raises(InvalidInput, match="--minutes 0"):
        full_stack(load_checkpoint(folder, lower=LOWER))


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "'linear'"),
        (lambda: llama(attention_bias=True), "biases"),
        (lambda: gpt2(scale_attn_by_inverse_layer_idx=True), "attention scaled by layer"),
        (lambda: opt(do_layer_norm_before=False), "norms behind"),
        (lambda: opt(word_embed_proj_dim=16), "words of another width"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path, make, named):
    folder = saved(make(), tmp_path / "m")
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "m", named)):
        load_checkpoint(folder, lower=0, window=Window(1))


def test_a_decoder_needs_a_start_id(tmp_path):
    folder = saved(llama(), tmp_path / "m")
    for name, entry in (("config.json", "bos_token_id"), ("tokenizer_config.json", "bos_token")):
        path = tmp_path / "m" / name
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), entry: None}), "utf-8")
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "m", "bos_token_id")):
        load_checkpoint(folder, lower=0, window=Window(1))


@pytest.mark.parametrize("lower, upper", [(-1, 2), (LAYERS, None), (3, 3)])
def test_impossible_splits_are_refused(folder, lower, upper):
    with pytest.raises(InvalidInput, match=mentioning(LAYERS, lower)):
        load_checkpoint(folder, lower=lower, upper=upper)


def test_a_table_of_words_has_no_windows(folder):
    with pytest.raises(InvalidInput, match=mentioning("--lower 0", 2)):
        load_checkpoint(folder, lower=0, window=Window(2))


def test_a_decoder_without_its_last_matrix_is_refused(tmp_path):
    folder = saved(LlamaModel(llama().config), tmp_path / "m")
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "m", "lm_head.weight")):
        load_checkpoint(folder, lower=0, window=Window(1))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    model = llama()
    model.resize_token_embeddings(VOCABULARY - 4)
    with pytest.raises(InvalidInput, match=mentioning(VOCABULARY - 4, VOCABULARY - 1)):
        load_checkpoint(saved(model, tmp_path / "m"), lower=0, window=Window(1))
