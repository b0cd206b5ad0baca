"""The cascade benchmark, small: what a toy BERT with random weights learns from real texts, and how it is counted."""

from __future__ import annotations

import json
from string import ascii_lowercase, digits

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

from bench.cascade import CascadeBench
from bench.measuring.cascade import TARGETS, bench_cascade, table_of
from bench.measuring.cascade_answers import answers_of
from bench.measuring.cascade_bare import Bare
from bench.measuring.cascade_material import material_of
from bench.measuring.cascade_served import label_in
from bench.measuring.cascade_traffic import CASCADE, Poisson, asked_of, exported
from builder.cascade.profile import read_profile
from builder.store.levels import save_ladder
from hplm.engine.engine import Engine
from hplm.errors import InvalidInput
from hplm.levels.plan import Plan, Step
from testing.random_store import SPECIAL
from tests.builder.cascade.measured import steady_seconds
from tests.support.message import mentioning

LAYERS = 4
PLAN = Plan((Step(0, 0.5, 4.0, 1.0), Step(2, weight=0.6)))  # of the toy's three levels; it prunes, and it draws
WORDS = ("a", "an", "and", "class", "file", "from", "if", "is", "name", "of", "return", "string", "the", "this", "to")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a BERT of random weights that reads letters and a few words."""
    folder = tmp_path_factory.mktemp("model")
    letters = [*ascii_lowercase, *digits]
    tokens = [*SPECIAL, *WORDS, *(one for one in letters if one not in WORDS), *(f"##{letter}" for letter in letters)]
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", numbers["[SEP]"]), ("[CLS]", numbers["[CLS]"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_second_run_measures_the_same_texts_again(model, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(Engine, "seconds", steady_seconds)
    case = CascadeBench(tmp_path, str(model), lower=1, stacks=(1, 2), drop=50, dtype="fp32", timed="bare").quick()
    figures = bench_cascade(case)
    assert set(TARGETS) | {"random_points_lost", "debiased_before", "debiased_after"} <= set(figures)
    assert all(name in table_of(figures) for name in (*TARGETS, *figures["ways"], "batch_ms_over_strong"))
    (chosen,) = (one for one in figures["choices"] if one["chosen"])
    none = next(one for one in figures["choices"] if not one["stacks"])
    assert figures["batch_ms_over_strong"] == pytest.approx(chosen["batch_ms"] / none["batch_ms"], abs=0.002)
    assert chosen["batch_ms"] <= none["batch_ms"]  # a token costs the same in each sheet here
    ways, tenants = figures["ways"], figures["tenants"]
    assert ways["strong"]["points_lost"] == 0 and ways["strong"]["work"] == 1
    assert ways["Cocktail-like vote"]["work"] == round((1 + 2 + 3) / 3, 3)
    assert ways["small"]["work"] == round(1 / 3, 3)
    assert ways["oracle"]["accuracy"] >= max(ways[way]["accuracy"] for way in ("small", "strong", "softmax, hard cut"))
    assert {len(own["accuracy"]) for own in tenants.values()} == {3} and len(tenants) == 2
    assert 0 <= figures["control_share"] < 1 and 0 <= figures["right_in_time"]["ladder"] <= 1
    capfd.readouterr()
    again = bench_cascade(CascadeBench(**{**vars(case), "timed": "nothing"}))
    assert "adapting" not in capfd.readouterr().err
    assert again["ways"] == ways and again["tenants"] == tenants and "latency_over_strong" not in again
    material = material_of(case)
    for one in material.cascaded:
        assert_plans_do_what_was_profiled(material, one, tmp_path / "answers")
    assert_the_engine_answers_alike(material, tmp_path)


def assert_plans_do_what_was_profiled(material, one, kept):
    profile, found = answers_of(material, one, one.question.profile, kept), read_profile(material.store, one.tenant)
    assert found is not None
    for candidate in found.front:
        outcome = profile.outcome(profile.through(candidate.plan))
        assert outcome.score == pytest.approx(candidate.score)
        assert outcome.went_on == pytest.approx(candidate.reached[1:])


def assert_the_engine_answers_alike(material, folder):
    """Only texts that are so near a threshold that rounding moves them may have other answers."""
    for one in material.cascaded:
        save_ladder(material.store, one.tenant, (PLAN,))
    expected = {}
    for one in material.cascaded:
        answers = answers_of(material, one, one.question.test, folder / "answers")
        outcome = answers.outcome(answers.through(PLAN))
        assert outcome.unread
        texts = [example.text for example in answers.measured.examples]
        expected.update({(one.tenant.id, text): right for text, right in zip(texts, outcome.values, strict=True)})
    asked = asked_of(material)
    bare = Bare(folder / "repository", exported(material, folder / "repository"), asked)
    try:
        sent = bare.open_loop([CASCADE], Poisson(np.zeros(len(asked)), np.arange(len(asked))))
    finally:
        bare.close()
    other = [
        one for label, one in zip(sent.labels, asked, strict=True) if (label == one.label) != expected[one.tenant, one.text]
    ]
    assert len(other) < 0.02 * len(asked)


def test_labels_are_read_behind_the_header_of_an_answer():
    body = json.dumps({"outputs": [{"name": "LABEL", "parameters": {"binary_data_size": 9}}]}).encode()
    assert label_in(body + b"\x05\0\0\0value") == "value"


def test_every_way_gets_the_same_arrivals():
    one, other = Poisson.of(100.0, 2.0, 7, 3), Poisson.of(100.0, 2.0, 7, 3)
    assert np.array_equal(one.due, other.due) and np.array_equal(one.asked, other.asked)
    assert len(one.due) == 200 and one.asked.max() < 7


def test_options_are_checked():
    with pytest.raises(InvalidInput, match=mentioning("--drop")):
        CascadeBench(drop=-1)
    with pytest.raises(InvalidInput, match=mentioning("--seeds")):
        CascadeBench(seeds=0)
