"""Tenants with levels: those of `tests.tasks` and one more, each with a level on a stack of one layer, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from builder.store.levels import save_ladder
from builder.store.store import Store
from hplm.levels.calibration import Calibration
from hplm.levels.plan import Plan, Step
from hplm.model.checkpoint import random_backbone
from testing.random_store import random_level
from testing.toy import Toy
from tests.confidence import CALIBRATIONS
from tests.tasks import exported, make_tasks

STACK = "small"
OWN = Plan((Step(1),))
HALF = Plan((Step(0, 0.7, 4.0), Step(1, weight=0.6)))  # about half of the texts go on
PRUNING = Plan((Step(0, 1.0, 0.0, 0.9), Step(1)))  # all go on, with fewer words
EARLY = Plan((Step(0),))
LADDER = (OWN, HALF, PRUNING, EARLY)
TEMPERATURE = 2.0  # of all levels, but for numbers


def make_ladders(folder: Path, ladder: Sequence[Plan] = LADDER) -> Toy:
    """Returns an exported repository in which every tenant of `tests.tasks` has a level and this ladder."""
    store = make_tasks(folder, {**CALIBRATIONS, "find": Calibration(temperature=2.5)}).store
    add_levels(store, ladder)
    return Toy(store, exported(store, folder / "ladders"))


def add_levels(store: Store, ladder: Sequence[Plan] = LADDER) -> None:
    """Gives each tenant of a store a level on a random stack."""
    stack = random_backbone(replace(store.config, upper_layers=1), 7)[1]
    with torch.no_grad():
        stack.layers[0].qkv.weight.mul_(20)  # so that tokens receive different attention
    store.save_stack(STACK, stack, {})
    for number, tenant in enumerate(store.tenants()):
        calibration = CALIBRATIONS["mark"] if tenant.task == "regress" else Calibration(temperature=TEMPERATURE)
        random_level(store, tenant, STACK, 0.3, seed=50 + number, calibration=calibration)
        save_ladder(store, tenant, ladder)
