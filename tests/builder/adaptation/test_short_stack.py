"""A stack of fewer layers learns the full stack's end. All else stays as it is, and an interrupted learning continues."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.adaptation import short_stack
from builder.adaptation.learning import Budget
from builder.adaptation.short_stack import StackLessons, choices, cut, shorten
from builder.hardware import OpaqueAttention
from hplm.errors import InvalidInput
from hplm.model.checkpoint import random_backbone
from testing.random_store import random_documents
from testing.toy import CONFIG
from tests.builder.adaptation.test_cut_adaptation import STEPS, continues_to_the_same
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
DEEP = replace(CONFIG, upper_layers=3)


@pytest.fixture(scope="module")
def documents():
    return random_documents(DEEP, 6000, 12, seed=1)


def halves():
    """Returns stacks whose layers change their input much, as those of trained models do."""
    lower, upper = random_backbone(DEEP)
    with torch.no_grad():
        for name, parameter in [*lower.named_parameters(), *upper.named_parameters()]:
            if "norm" not in name:
                parameter.mul_(8)
    return lower, upper


def run(documents, layers=1, seed=0, saved=None, **limits):
    lower, upper = halves()
    stack, report = shorten(
        lower, upper, layers, documents, Budget(**(limits or {"steps": 30})), seed, CPU, show_progress=False, saved=saved
    )
    return stack, report


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_layers_are_chosen_first_last_and_evenly():
    assert choices(4, 1) == [[0], [3]] and choices(4, 2) == [[0, 1], [2, 3], [0, 3]]
    assert choices(6, 3) == [[0, 1, 2], [3, 4, 5], [0, 2, 5]] and choices(2, 1) == [[0], [1]]
    for full in range(2, 14):
        for layers in range(1, full):
            assert all(sorted(set(chosen)) == chosen and len(chosen) == layers for chosen in choices(full, layers))


def test_a_cut_stack_computes_the_chosen_layers_behind_the_same_entry():
    _, upper = halves()
    stack, attend = cut(upper, [0, 2]), OpaqueAttention([4], DEEP.heads, CPU)
    sums, places = torch.randn(4, DEEP.hidden), torch.arange(4)
    with torch.no_grad():
        entered = upper.enter(sums, places, places % 2)
        expected = upper.layers[2](upper.layers[0](entered, attend), attend)
        assert torch.equal(stack(sums, places, places % 2, attend), expected)
    assert stack.config == replace(DEEP, upper_layers=2) and [layer.number for layer in stack.layers] == [0, 1]
    assert [layer.number for layer in upper.layers] == [0, 1, 2] and stack.layers[0] is not upper.layers[0]


def test_a_lesson_is_what_the_full_stack_computes(documents):
    lower, upper = halves()
    lesson = StackLessons(lower, upper, CPU).lesson(documents[:5], np.random.default_rng(0))
    attend = OpaqueAttention(lesson.lengths, DEEP.heads, CPU)
    assert lesson.tokens == sum(lesson.lengths) == 60 and lesson.lengths == [12] * 5
    assert torch.allclose(upper.through(lesson.entered, attend), lesson.at_end, atol=1e-5)  # without gradients by the kernel


@pytest.mark.parametrize("layers", [1, 2])
def test_a_stack_learns_the_end_of_the_full_one_from_the_best_start(documents, layers):
    stack, report = run(documents, layers)
    assert len(stack.layers) == report.layers == layers
    assert report.tried[0]["layers"] == list(range(layers)) and len(report.tried) > 1
    best = max(report.tried, key=lambda tried: tried["explained"])
    assert (report.started_from, report.at_start) == (best["layers"], best["explained"])
    assert report.at_end > report.at_start + 0.05 and report.kept and report.last_loss < report.first_loss
    assert report.steps == 30 == report.curve[-1][0] and report.tokens > 10_000 and report.held_out_tokens > 500
    _, untrained = run(documents, layers, steps=0)
    assert untrained.at_end == untrained.at_start == report.at_start and untrained.curve == []


def test_only_the_layers_of_the_stack_change(documents):
    lower, upper = halves()
    before = weights(lower), weights(upper)
    stack, _ = shorten(lower, upper, 1, documents, Budget(steps=3), 0, CPU, show_progress=False)
    assert same(weights(lower), before[0]) and same(weights(upper), before[1])
    for name, tensor in stack.state_dict().items():
        if not name.startswith("layers."):
            assert torch.equal(tensor, before[1][name]), name


def test_a_stack_that_learned_nothing_is_its_start(documents, monkeypatch):
    monkeypatch.setattr(short_stack, "LEARNING_RATE", 30.0)
    stack, report = run(documents, steps=5)
    assert not report.kept and report.at_end == report.at_start and report.steps == 5
    assert same(weights(stack), weights(cut(halves()[1], report.started_from)))


def test_the_same_seed_gives_the_same_bytes(documents):
    first, again, other = (weights(run(documents, seed=seed, steps=3)[0]) for seed in (5, 5, 6))
    assert same(first, again) and not same(first, other)


def test_an_interrupted_learning_ends_with_the_same_weights(documents, tmp_path, monkeypatch):
    def learn(saved):
        stack, report = run(documents, saved=saved, steps=STEPS)
        return list(weights(stack).values()), (report.first_loss, report.at_start, report.at_end, report.started_from)

    continues_to_the_same(learn, tmp_path, monkeypatch)


def test_a_corpus_without_two_documents_is_refused(documents):
    with pytest.raises(InvalidInput, match=mentioning(1)):
        run(documents[:1])
