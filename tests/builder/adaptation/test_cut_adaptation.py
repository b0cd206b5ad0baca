"""A killed adaptation continues where it stopped, to the same weights: of a root, and of a domain with masked words."""

import multiprocessing
import os
import signal

import pytest
import torch

from builder.adaptation.distillation import adapt
from builder.adaptation.learning import Budget
from builder.adaptation.masked import further_pretrain
from builder.store import savepoint
from hplm.model.checkpoint import load_checkpoint, split
from tests.builder.adaptation.test_masked import CPU, chained, save

pytestmark = pytest.mark.slow

STEPS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(str(save(tmp_path_factory.mktemp("model"), "without")))


def distilled(checkpoint, documents, saved):
    lower, upper = split(checkpoint)
    report = adapt(checkpoint, lower, upper, documents, Budget(steps=STEPS), 3, True, CPU, False, saved)
    return [*lower.state_dict().values(), *upper.state_dict().values()], (report.first_loss, report.at_start, report.at_end)


def reached(checkpoint, documents, saved):
    """Learns until it explains enough, which it does at the end of the second round."""
    lower, upper = split(checkpoint)
    budget = Budget(steps=100, until=0.5)
    report = adapt(checkpoint, lower, upper, documents, budget, 3, True, CPU, False, saved)
    assert report.steps < 100
    return [*lower.state_dict().values(), *upper.state_dict().values()], (report.first_loss, report.explained, report.at_end)


def guessed(checkpoint, documents, saved):
    lower, upper = split(checkpoint)
    head, report = further_pretrain(
        checkpoint.config, lower, upper, None, "", documents, Budget(steps=STEPS), 3, CPU, False, saved
    )
    return [*lower.state_dict().values(), *head.state_dict().values()], (report.first_loss, report.at_start, report.history)


def killed(learn, at_save):
    """Runs in a process of its own, which is killed before the `at_save`-th savepoint gets its name."""

    def work():
        savepoint.SECONDS_BETWEEN, saves, replace = 0.0, 0, os.replace

        def dying(source, target):
            nonlocal saves
            saves += 1
            if saves == at_save:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        os.replace = dying
        learn()

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL


def killed_everywhere(learn, folder, monkeypatch):
    """Kills `learn(saved)` at several savepoints. What continues must end with the same weights and report."""
    undisturbed, report = learn(None)
    begun, load = [], savepoint.Savepoint.load

    def told(self):
        state = load(self)
        begun.append(state["course"]["steps"] if state is not None else 0)
        return state

    monkeypatch.setattr(savepoint.Savepoint, "load", told)
    for at_save in (1, 4, 9):
        saved = folder / f"cut-{at_save}" / "adaptation.pt"
        killed(lambda saved=saved: learn(saved), at_save)
        weights, its_report = learn(saved)
        assert all(torch.equal(one, other) for one, other in zip(weights, undisturbed, strict=True))
        assert its_report == report
    assert max(begun) >= 5  # it continued


@pytest.mark.parametrize("learn", [distilled, guessed], ids=["distilled", "guessed"])
def test_a_killed_adaptation_ends_with_the_same_weights(checkpoint, tmp_path, learn, monkeypatch):
    documents = chained(checkpoint.config, 3000, 16, seed=1)
    killed_everywhere(lambda saved: learn(checkpoint, documents, saved), tmp_path, monkeypatch)
