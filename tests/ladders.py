"""Tenants with levels: those of `tests.tasks` and one more, each with a level on a stack of one layer, with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hplm.adapters.bank import write_bank
from hplm.adapters.heads import size_for
from hplm.adapters.layout import adapter_layout, head_layout
from hplm.adapters.record import Record
from hplm.levels.calibration import Calibration
from hplm.levels.plan import Plan, Step
from hplm.model.checkpoint import random_backbone
from hplm.model.weights import save_weights
from hplm.tenants.level import Level
from hplm.tenants.snapshot import Snapshot
from testing.toy import CONFIG, Toy
from tests.confidence import CALIBRATIONS
from tests.tasks import make_tasks

SHALLOW = replace(CONFIG, upper_layers=1)
STACK = "small"
RANK = 4
OWN = Plan((Step(1),))
HALF = Plan((Step(0, 0.7, 4.0), Step(1, weight=0.6)))  # about half of the texts go on
PRUNING = Plan((Step(0, 1.0, 0.0, 0.9), Step(1)))  # all go on, with fewer words
EARLY = Plan((Step(0),))
LADDER = (OWN, HALF, PRUNING, EARLY)
TEMPERATURE = 2.0  # of all levels, but for numbers


def make_ladders(folder: Path, ladder: Sequence[Plan] = LADDER) -> Toy:
    """Returns an exported repository in which every tenant of `tests.tasks` has a level and this ladder."""
    toy = make_tasks(folder, {**CALIBRATIONS, "find": Calibration(temperature=2.5)})
    add_levels(toy.folder, ladder)
    return toy


def add_levels(folder: Path, ladder: Sequence[Plan] = LADDER, calibrations: Mapping[str, Calibration] = CALIBRATIONS) -> None:
    """Gives each tenant of an exported model folder a level on a random stack."""
    (folder / "stacks").mkdir()
    stack = random_backbone(SHALLOW, 7)[1].state_dict()
    stack["layers.0.qkv.weight"] *= 20  # so that tokens receive different attention
    save_weights(stack, folder / "stacks" / f"{STACK}.safetensors")
    exported, generator = Snapshot.load(folder / "tenants.json"), torch.Generator().manual_seed(3)

    def random_record(layout):
        return layout.pack(
            [
                {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in layout.shapes.items()}
                for _ in range(layout.layers)
            ]
        )

    adapter, entries, heads, tenants = adapter_layout(SHALLOW, "bottleneck", RANK), [], {}, []
    assert adapter is not None
    for number, tenant in enumerate(exported.tenants):
        head = head_layout(SHALLOW, size_for(len(tenant.labels)))
        own = heads.setdefault(head, [])
        level = Level(
            stack=STACK,
            head=Record(f"level-{head.file_name}", len(own), tenant.uid, tenant.version),
            adapter=Record(f"level-{adapter.file_name}", number, tenant.uid, tenant.version),
            calibration=calibrations["mark"] if tenant.task == "regress" else Calibration(temperature=TEMPERATURE),
        )
        own.append((tenant.uid, tenant.version, random_record(head)))
        entries.append((tenant.uid, tenant.version, random_record(adapter)))
        tenants.append(replace(tenant, levels=(level,), ladder=tuple(ladder)))
    write_bank(folder / "adapters" / f"level-{adapter.file_name}", adapter, entries)
    for head, own in heads.items():
        write_bank(folder / "adapters" / f"level-{head.file_name}", head, own)
    Snapshot(0, exported.branches, tenants, exported.export).save(folder / "tenants.json")
