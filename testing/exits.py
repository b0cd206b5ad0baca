"""Random exits for tenants of random stores, at which about half of the texts leave."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from builder.store.exits import StoredExits, layout_of, write_exits
from builder.store.store import Store, TenantFile
from hplm.levels.calibration import INTERVAL, Calibration
from hplm.tasks import find_task
from hplm.tenants.exits import NEVER, Exits, Plan


def random_exits(
    store: Store,
    tenant: TenantFile,
    thresholds: Sequence[float] | None = None,
    plans: int = 2,
    spread: float = 0.3,
    seed: int = 0,
) -> StoredExits:
    """Gives a tenant exits of random weights, and two plans: one with these thresholds, and a cheaper one with lower ones.

    `thresholds`: of each exit; None: some at which texts leave and stay. `plans`: 1 leaves the cheaper one out.
    """
    generator = torch.Generator().manual_seed(seed)
    layout = layout_of(store, tenant)
    heads = [
        {name: torch.randn(shape, generator=generator) * spread for name, shape in layout.shapes.items()}
        for _ in range(layout.layers)
    ]
    heads = [{name: weight.to(layout.torch_dtype) for name, weight in head.items()} for head in heads]
    own = tuple(thresholds) if thresholds is not None else (0.6,) * layout.layers
    shares = tuple(0.3 if threshold < NEVER else 0.0 for threshold in own)
    lower = tuple(threshold if threshold >= NEVER else threshold / 2 for threshold in own)
    calibration = Calibration(INTERVAL, delta=1.0) if find_task(tenant.task).is_number else Calibration(temperature=1.5)
    both = (Plan(own, shares, (0.9,) * layout.layers, 0.7), Plan(lower, shares, (0.8,) * layout.layers, 0.5))
    found = StoredExits(Exits(None, (calibration,) * layout.layers, both[:plans]), heads, {}, {})
    write_exits(store, tenant, found)
    return found
