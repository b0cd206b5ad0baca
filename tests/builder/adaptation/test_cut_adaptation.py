"""An interrupted adaptation continues where it stopped, to the same weights: of a root, and of a domain with masked words."""

import os

import pytest
import torch

from builder.adaptation.distillation import adapt
from builder.adaptation.learning import Budget
from builder.adaptation.masked import further_pretrain
from builder.store import savepoint
from hplm.model.checkpoint import load_checkpoint, split
from tests.builder.adaptation.test_masked import CPU, chained, save

pytestmark = pytest.mark.slow

STEPS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(str(save(tmp_path_factory.mktemp("model"), "without")))


def distilled(checkpoint, documents, saved):
    lower, upper = split(checkpoint)
    report = adapt(checkpoint, lower, upper, documents, Budget(steps=STEPS), 3, True, CPU, False, saved)
    return [*lower.state_dict().values(), *upper.state_dict().values()], (report.first_loss, report.at_start, report.at_end)


def guessed(checkpoint, documents, saved):
    lower, upper = split(checkpoint)
    head, report = further_pretrain(
        checkpoint.config, lower, upper, None, "", documents, Budget(steps=STEPS), 3, CPU, False, saved
    )
    return [*lower.state_dict().values(), *head.state_dict().values()], (report.first_loss, report.at_start, report.history)


def interrupted(learn, at_save, monkeypatch):
    """Ends `learn` before its `at_save`-th savepoint gets its name."""
    saves, replace = 0, os.replace

    def dying(source, target):
        nonlocal saves
        saves += 1
        if saves == at_save:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(savepoint, "SECONDS_BETWEEN", 0.0)
        patch.setattr(os, "replace", dying)
        learn()


def continues_to_the_same(learn, folder, monkeypatch):
    """Interrupts `learn(saved)` twice. What continues must end with the same weights and report."""
    undisturbed, report = learn(None)
    begun, load = [], savepoint.Savepoint.load

    def told(self):
        state = load(self)
        begun.append(state["course"]["steps"] if state is not None else 0)
        return state

    monkeypatch.setattr(savepoint.Savepoint, "load", told)
    saved = folder / "cut" / "adaptation.pt"
    for at_save in (2, 5):
        interrupted(lambda: learn(saved), at_save, monkeypatch)
    weights, its_report = learn(saved)
    assert all(torch.equal(one, other) for one, other in zip(weights, undisturbed, strict=True))
    assert its_report == report
    assert max(begun) >= 2, "it must have continued"


@pytest.mark.parametrize("learn", [distilled, guessed], ids=["distilled", "guessed"])
def test_an_interrupted_adaptation_ends_with_the_same_weights(checkpoint, tmp_path, learn, monkeypatch):
    """Takes seconds, because it learns twice."""
    documents = chained(checkpoint.config, 3000, 16, seed=1)
    continues_to_the_same(lambda saved: learn(checkpoint, documents, saved), tmp_path, monkeypatch)
