"""Levels of a toy's tenants, with random weights on a shorter stack."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import torch

from builder.store.resumable import write_json
from builder.store.store import Store, TenantFile
from hplm.levels.calibration import Calibration
from hplm.model.weights import save_weights

CALIBRATION = Calibration(temperature=3.0)


def make_level(
    store: Store,
    tenant: TenantFile,
    name: str,
    layers: int = 1,
    calibration: Calibration | None = CALIBRATION,
    rank: int = 4,
    seed: int = 0,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    described, config = replace(tenant, rank=rank), replace(store.config, upper_layers=layers)
    folder = store.tenant_folder(tenant.id, tenant.version) / "levels" / name
    folder.mkdir(parents=True, exist_ok=True)
    adapter = described.adapter_layout(config)
    drawn = lambda layout: {key: torch.randn(shape, generator=generator) * 0.3 for key, shape in layout.shapes.items()}  # noqa: E731
    if adapter is not None:
        flat = {f"{number}.{key}": tensor for number in range(layers) for key, tensor in drawn(adapter).items()}
        save_weights(flat, folder / "adapter.safetensors")
    save_weights(drawn(described.head_layout(config)), folder / "head.safetensors")
    write_json(folder / "level.json", json.loads(json.dumps(asdict(described))))
    if calibration is not None:
        write_json(folder / "calibration.json", {"calibration": asdict(calibration), "asked": {}, "report": {}})
