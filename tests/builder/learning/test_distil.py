"""Adaptation against a tiny teacher: it learns, does not change shared weights, and gives the same result again."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModel

from builder.learning import distil as distillation
from builder.learning.bodies import WholeBody
from builder.learning.distil import distil
from builder.learning.limits import Budget
from builder.learning.windows import Lessons, Student
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.windows import Window
from testing.random_store import random_documents
from tests.builder.checkpoints import VOCABULARY, same, weights
from tests.support.device import DEVICE
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def documents(checkpoint):
    return random_documents(checkpoint.config, 6000, 12, seed=1)


def run(checkpoint, documents, steps, seed=0, train_upper=True, start=None):
    lower, upper = start or split(checkpoint)
    report = distil(checkpoint, lower, upper, documents, Budget(steps=steps), seed, DEVICE, False, train_upper=train_upper)
    return lower, upper, report


@pytest.fixture(scope="module")
def adapted(checkpoint, documents):
    return run(checkpoint, documents, steps=40)


@pytest.mark.parametrize("upper", [2, 1])
def test_the_teacher_is_the_original_model_also_if_upper_layers_are_dropped(bert, upper):
    teacher = WholeBody(load_checkpoint(str(bert), lower=2, upper=upper)).eval()
    stock = AutoModel.from_pretrained(bert, add_pooling_layer=False).eval()
    tokens = torch.randint(5, VOCABULARY, (9,), generator=torch.Generator().manual_seed(0))
    found = teacher.taught(tokens, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]), [4, 5])  # at the split, at the end
    for part in (slice(0, 4), slice(4, 9)):
        with torch.no_grad():
            expected = stock(tokens[None, part], output_hidden_states=True).hidden_states
        assert all(torch.allclose(own[part], expected[layer][0], atol=1e-5) for own, layer in zip(found, (2, 4), strict=True))


def test_the_closed_form_and_the_steps_both_reduce_the_error(adapted):
    report = adapted[2]
    fitted, end = report["exams"]
    assert report["at_start"]["at_split"] < fitted["at_split"] < end["at_split"] and fitted["score"] < end["score"]
    assert report["last_loss"] < report["first_loss"]
    assert end["at_split"] > 0.5 and report["steps"] == report["kept_step"] == 40


def test_positions_beyond_the_longest_document_are_fitted_too(checkpoint, adapted):
    """Documents have 12 tokens, the model reads 40."""
    lower, upper, _ = adapted
    lessons = Lessons(checkpoint.config, WholeBody(checkpoint).eval().to(DEVICE), DEVICE)
    lesson = lessons.lesson(random_documents(checkpoint.config, 2000, 40, seed=9), np.random.default_rng(0))
    with torch.no_grad():
        error = (Student(lower, upper).to(DEVICE)(lesson)[0] - lesson.at_split).square().sum(1)
    variance = lesson.at_split.var(0).sum()
    assert error[lesson.positions >= 12].mean() < 0.6 * variance


def test_a_domain_s_lower_layers_learn_on_and_a_frozen_upper_stack_does_not_change_by_a_bit(checkpoint, documents, adapted):
    start = copy.deepcopy(adapted[:2])
    lower, upper, report = run(checkpoint, documents, steps=5, seed=3, train_upper=False, start=start)
    before, after = weights(adapted[0]), weights(lower)
    assert same(weights(upper), weights(adapted[1]))
    assert not torch.equal(before["0.layers.0.qkv.weight"], after["0.layers.0.qkv.weight"])
    assert torch.equal(before["0.words.weight"], after["0.words.weight"])
    assert report["exams"][0]["score"] == pytest.approx(report["at_start"]["at_end"])  # nothing was fitted


def test_distinct_windows_are_computed_once_and_nothing_is_lost(checkpoint, documents):
    lower, upper = split(checkpoint)
    lessons = Lessons(checkpoint.config, WholeBody(checkpoint).eval().to(DEVICE), DEVICE)
    texts = documents[:20]
    lesson = lessons.lesson(texts, np.random.default_rng(0))
    assert len(lesson.windows) < lesson.tokens
    whole = Window(3).of(np.concatenate(texts), np.array([len(text) for text in texts]))
    shrunk = lesson.windows[lesson.window_of].cpu().numpy()
    kept = shrunk != 0
    assert (shrunk[kept] == whole[kept]).all() and kept[:, 1].all()
    assert not (kept[:, 0] & ~kept[:, 2] & (whole[:, 2] != 0)).any()  # the left neighbour goes first
    with torch.no_grad():
        expected = Window(3).aggregate(lower(torch.from_numpy(shrunk)))
        assert torch.allclose(Student(lower, upper).to(DEVICE).sums(lesson).cpu(), expected, atol=1e-5)


def test_without_steps_only_the_closed_form_is_fitted(checkpoint, documents, adapted):
    """Of the steps after it, second segments take the first one's."""
    _, upper, report = run(checkpoint, documents, steps=0)
    assert report["steps"] == 0 and report["exams"] == adapted[2]["exams"][:1]
    assert report["exams"][0]["score"] > report["at_start"]["at_end"]
    fitted, moved = (stack.segments.weight.detach() for stack in (upper, adapted[1]))
    assert not torch.allclose(moved[0], fitted[0], atol=1e-4)  # no lesson has a second segment
    assert torch.allclose(moved[1] - moved[0], fitted[1] - fitted[0], atol=1e-6) and (moved[1] != moved[0]).any()


def test_the_seed_chooses_the_held_out_texts_and_one_document_is_too_few(documents):
    first, again, other = (
        [document.tolist() for document in distillation.split_documents(documents, seed)[0]] for seed in (5, 5, 6)
    )
    assert first == again != other
    with pytest.raises(InvalidInput, match=mentioning(1)):
        distillation.split_documents([documents[0], np.array([2, 3], dtype=np.int32)], 0)
