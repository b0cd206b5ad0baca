"""A stack of fewer layers learns the full stack's end, and all else stays as it is."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.adaptation.learning import Budget
from builder.adaptation.short_stack import StackLessons, cut, shorten
from builder.hardware import OpaqueAttention
from hplm.errors import InvalidInput
from hplm.model.checkpoint import random_backbone
from testing.random_store import random_documents
from testing.toy import CONFIG
from tests.builder.adaptation.models import CPU, same, weights
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

DEEP = replace(CONFIG, upper_layers=3)


@pytest.fixture(scope="module")
def documents():
    return random_documents(DEEP, 6000, 12, seed=1)


@pytest.fixture
def halves():
    """Stacks whose layers change their input much, as those of trained models do."""
    lower, upper = random_backbone(DEEP)
    with torch.no_grad():
        for name, parameter in [*lower.named_parameters(), *upper.named_parameters()]:
            if "norm" not in name:
                parameter.mul_(8)
    return lower, upper


def test_a_cut_stack_and_its_lesson_are_computed_as_by_the_full_one(halves, documents):
    lower, upper = halves
    stack, attend = cut(upper, [0, 2]), OpaqueAttention([4], DEEP.heads, CPU)
    sums, places = torch.randn(4, DEEP.hidden), torch.arange(4)
    lesson = StackLessons(lower, upper, CPU).lesson(documents[:5], np.random.default_rng(0))
    with torch.no_grad():
        entered = upper.enter(sums, places, places % 2)
        expected = upper.layers[2](upper.layers[0](entered, attend), attend)
        assert torch.equal(stack(sums, places, places % 2, attend), expected)
        whole = upper.through(lesson.entered, OpaqueAttention(lesson.lengths, DEEP.heads, CPU))
    assert torch.allclose(whole, lesson.at_end, atol=1e-5) and lesson.lengths == [12] * 5


def test_a_stack_learns_the_end_of_the_full_one_from_the_best_start(halves, documents):
    lower, upper = halves
    before = weights(lower), weights(upper)
    stack, report = shorten(lower, upper, 1, documents, Budget(steps=30), 0, CPU, show_progress=False)
    assert len(stack.layers) == report.layers == 1 and len(report.tried) > 1
    best = max(report.tried, key=lambda tried: tried["explained"])
    assert (report.started_from, report.at_start) == (best["layers"], best["explained"])
    assert report.at_end > report.at_start + 0.05 and report.kept and report.last_loss < report.first_loss
    assert same(weights(lower), before[0]) and same(weights(upper), before[1])
    for name, tensor in stack.state_dict().items():
        assert name.startswith("layers.") or torch.equal(tensor, before[1][f"0.{name}"]), name
    with pytest.raises(InvalidInput, match=mentioning(1)):
        shorten(lower, upper, 1, documents[:1], Budget(steps=30), 0, CPU, show_progress=False)
