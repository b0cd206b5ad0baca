"""Reads versions of tenants as earlier releases stored them: `tenant.json`, and files of weights beside it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from hplm.adapters.layout import exit_layout
from hplm.errors import MISFITS, Broken
from hplm.model.config import BackboneConfig
from hplm.model.weights import load_weights
from hplm.tasks import find_task
from hplm.tenants.exits import Exits
from hplm.tenants.knowledge import ExitKnowledge, Knowledge, read_calibration

if TYPE_CHECKING:
    from builder.store.version import TenantFile

log = logging.getLogger(__name__)
TENANT = "tenant.json"
NO_LONGER_SERVED = ("ladder.json", "link.json")


def described(folder: Path, form: type[TenantFile]) -> TenantFile:
    path = folder / TENANT
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Broken(f"{path} does not describe a tenant ({error}): build or copy it again") from None


def read(folder: Path, tenant: TenantFile, config: BackboneConfig) -> Knowledge:
    """Returns all that is published of the version."""
    for name in NO_LONGER_SERVED:
        if (folder / name).exists():
            log.warning("%s is no longer served: the full stack of tenant %s answers", folder / name, tenant.id)
    path = folder / TENANT
    adapter = _layers(folder / "adapter.safetensors", config.upper_layers) if tenant.rank else None
    head = load_weights(folder / "head.safetensors") if tenant.has_head else {}
    found = tenant.knowledge(config, adapter, head)
    try:
        if (path := folder / "calibration.json").exists():
            stored = json.loads(path.read_text("utf-8"))["calibration"]
            found = replace(found, calibration=read_calibration(stored, len(tenant.labels), path))
        if (path := folder / "exits.json").exists():
            exits = Exits.read(json.loads(path.read_text("utf-8"))["exits"])
            layout = exit_layout(config, find_task(tenant.task).exit_outputs(tenant.labels), tenant.dtype)
            heads = _layers(folder / "exits.safetensors", layout.layers)
            found = replace(found, exits=ExitKnowledge(exits, layout, heads))
            if any({name: part.shape for name, part in head.items()} != layout.shapes for head in heads):
                raise TypeError("its heads are of another tenant")
        return found
    except MISFITS as error:
        raise Broken(f"{path} cannot be read ({error}): make it again with `hplm calibrate` or `hplm tenant exits`") from None


def _layers(path: Path, count: int) -> list[dict[str, Tensor]]:
    layers: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in load_weights(path).items():
        layer, _, part = name.partition(".")
        layers[int(layer)][part] = tensor
    return layers
