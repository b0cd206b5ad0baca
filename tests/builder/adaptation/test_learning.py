"""The loop of an adaptation."""

import math
from functools import partial

import pytest
import torch
from tqdm import tqdm

from builder.adaptation import learning as adaptation
from builder.adaptation.learning import Budget, Group, Learning
from builder.store.savepoint import Savepoint
from builder.training.model import Diverged
from tests.support.message import mentioning


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_diverging_adaptation_ends_at_once_and_is_not_saved(broken, tmp_path, monkeypatch):
    monkeypatch.setattr("builder.store.savepoint.SECONDS_BETWEEN", 0.0)
    module, seen = torch.nn.Linear(1, 1), []

    def loss_of(step):
        seen.append(step)
        loss = module(torch.ones(1)).square().sum()
        return (loss * math.nan if broken == "loss" else (loss - loss.detach()).abs().sqrt()) if step == 3 else loss, 1

    path = tmp_path / "saved.pt"
    learning = Learning(module, [Group(0.1, dict(module.named_parameters()))], Budget(steps=100), Savepoint(path))
    with pytest.raises(Diverged, match=mentioning("head", 4, "--seed")):
        learning.run("fitting a head", lambda first: iter(range(first, 100)), loss_of, show_progress=False)
    assert seen == [0, 1, 2, 3] and torch.load(path)["course"]["steps"] == 3
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_a_bar_is_not_written_after_each_step(monkeypatch, capsys):
    monkeypatch.setattr(adaptation, "tqdm", partial(tqdm, mininterval=1e9))
    module = torch.nn.Linear(1, 1)
    learning = Learning(module, [Group(0.1, dict(module.named_parameters()))], Budget(steps=150), Savepoint(None))
    learning.run("adapting", lambda first: iter(range(first, 150)), lambda _: (module(torch.ones(1)).sum(), 1), True)
    said = capsys.readouterr().err
    assert said.count("step ") < 5 and "100%" in said and "step 150" in said
