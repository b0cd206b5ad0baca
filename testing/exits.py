"""Random exits for tenants of random stores, at which about half of the texts leave."""

from __future__ import annotations

import torch

from builder.store.exits import StoredExits, layout_of, write_exits
from builder.store.store import Store, TenantFile
from hplm.levels.calibration import INTERVAL, Calibration
from hplm.tasks import find_task
from hplm.tenants.exits import Exits, Plan


def random_exits(
    store: Store,
    tenant: TenantFile,
    exit: int | None = 0,
    threshold: float = 0.6,
    plans: int = 2,
    spread: float = 0.3,
    seed: int = 0,
) -> StoredExits:
    """Gives a tenant exits of random weights, and two plans: one with this threshold, and a cheaper one with half of it.

    `plans`: 1 leaves the cheaper one out.
    """
    generator = torch.Generator().manual_seed(seed)
    layout = layout_of(store, tenant)
    heads = [
        {name: torch.randn(shape, generator=generator) * spread for name, shape in layout.shapes.items()}
        for _ in range(layout.layers)
    ]
    heads = [{name: weight.to(layout.torch_dtype) for name, weight in head.items()} for head in heads]
    calibration = Calibration(INTERVAL, delta=1.0) if find_task(tenant.task).is_number else Calibration(temperature=1.5)
    both = Plan(exit, threshold, 0.3, 0.9, 0.7), Plan(exit, threshold / 2, 0.3, 0.8, 0.5)
    found = StoredExits(Exits(None, (calibration,) * layout.layers, both[:plans]), heads, {}, {})
    write_exits(store, tenant, found)
    return found
