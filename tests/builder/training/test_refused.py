"""Data and options that no tenant can learn with are refused, and named."""

import pytest

from builder.evaluation.tenant import evaluate_tenant
from hplm.errors import InvalidInput
from tests.builder.training.small_tenants import CPU, learn, made, pretend, write
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


def test_labels_unseen_in_training_are_named_with_their_line(store, tmp_path):
    train = made(tmp_path, "classify", 60, 1)
    other = write(tmp_path / "other.jsonl", [{"text": "a", "label": "left"}, {"text": "b", "label": "up"}])
    with pytest.raises(InvalidInput, match=mentioning(f"{other}:2", "'up'", train)):
        learn(store, "classify", train, other)
    pretend(store, "classify", train)
    with pytest.raises(InvalidInput, match=mentioning(f"{other}:2", "'up'", "'acme'")):
        evaluate_tenant(store, "acme", other, CPU, show_progress=False)


def test_data_that_cannot_be_learned_are_refused(store, tmp_path):
    one = write(tmp_path / "one.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "x"}])
    with pytest.raises(InvalidInput, match=mentioning(one, "'x'")):
        learn(store, "classify", one)
    few = write(tmp_path / "few.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    with pytest.raises(InvalidInput, match=mentioning(few, "--dev")):
        learn(store, "classify", few)
    with pytest.raises(InvalidInput, match=mentioning("'nobody'", store.folder)):
        evaluate_tenant(store, "nobody", few, CPU, show_progress=False)
    with pytest.raises(InvalidInput, match="'guess'"):
        learn(store, "guess", few)


def test_values_that_cannot_be_stored_or_do_not_differ_are_refused(store, tmp_path):
    same = write(tmp_path / "same.jsonl", [{"text": text, "label": 2} for text in "abc"])
    with pytest.raises(InvalidInput, match=mentioning(same, 2)):
        learn(store, "regress", same)
    far = write(tmp_path / "far.jsonl", [{"text": str(i), "label": 2000 + i} for i in range(5)])
    with pytest.raises(InvalidInput, match=mentioning(far, 2002)):
        learn(store, "regress", far, far)
    none = write(tmp_path / "none.jsonl", [{"text": "a", "labels": []}] * 3)
    with pytest.raises(InvalidInput, match=mentioning(none)):
        learn(store, "multilabel", none)


def test_options_that_make_no_sense_are_named(store, tmp_path):
    train = made(tmp_path, "classify", 20, 1)
    counts, rates = ("epochs", "patience", "batch_texts"), {"doubt": -1, "learning_rate": 0.0, "body_rate": -1, "dropout": 1.0}
    for option, value in [*((name, 0) for name in counts), *rates.items()]:
        with pytest.raises(InvalidInput, match=f"{option.split('_')[-1]} {value}"):
            learn(store, "classify", train, **{option: value})


def test_a_text_too_long_for_a_server_is_refused(store, tmp_path):
    train = write(tmp_path / "long.jsonl", [{"text": "a", "label": "x"}, {"text": "a " * 60_000, "label": "y"}])
    with pytest.raises(InvalidInput, match=mentioning(f"{train}:2", "100,000")):
        learn(store, "classify", train, train)


def test_adapters_that_cannot_hold_what_learns_are_refused(store, tmp_path):
    train = made(tmp_path, "classify", 20, 1)
    with pytest.raises(InvalidInput, match=mentioning("'bottleneck'", "lora")):
        learn(store, "classify", train, body_rate=1e-4)
    with pytest.raises(InvalidInput, match="--rank"):
        learn(store, "classify", train, rank=0, body_rate=1e-4)
