"""The levels of a tenant, as a profile computes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from builder.store.calibrations import FILE, WAY_OUT, calibration_of
from builder.store.resumable import digest_of
from builder.store.stacks import UPPER
from builder.store.store import Store, TenantFile
from builder.training.model import Weights
from hplm.adapters.layout import Layout
from hplm.errors import MISFITS, Broken, InvalidInput
from hplm.levels.calibration import Calibration
from hplm.model.stacks import UpperStack
from hplm.model.weights import load_weights

OWN = "full"  # the name that reports give a tenant's own level, after its stack
LEVEL = "level.json"  # describes a level as `tenant.json` describes a tenant


@dataclass(frozen=True)
class StoredLevel:
    name: str  # of its stack; OWN: the full one
    layers: int
    open: Callable[[], UpperStack]  # reads the stack
    adapter: Layout | None
    head: Layout
    weights: tuple[list[Weights] | None, Weights]  # of the adapter, layer by layer, and the head
    calibration: Calibration | None
    digest: str  # of the files that its logits depend on


def levels_of(store: Store, tenant: TenantFile) -> list[StoredLevel]:
    """Returns the levels of this version of a tenant, the shallowest first. Its own one is the last."""
    if not tenant.has_head:
        raise InvalidInput(f"tenant {tenant.id!r} generates text: only answers of encoders have levels")
    shallower = [_shallower(store, folder) for folder in _folders(store, tenant)]
    return [*sorted(shallower, key=lambda level: (level.layers, level.name)), own(store, tenant)]


def has_levels(store: Store, tenant: TenantFile) -> bool:
    """Whether this version of a tenant has levels besides its own one."""
    return any(_folders(store, tenant))


def _folders(store: Store, tenant: TenantFile) -> Iterator[Path]:
    return (path.parent for path in store.tenant_folder(tenant.id, tenant.version).glob(f"levels/*/{LEVEL}"))


def own(store: Store, tenant: TenantFile) -> StoredLevel:
    folder = store.tenant_folder(tenant.id, tenant.version)
    return StoredLevel(
        name=OWN,
        layers=store.config.upper_layers,
        open=store.upper,
        adapter=tenant.adapter_layout(store.config),
        head=tenant.head_layout(store.config),
        weights=store.tenant_weights(tenant),
        calibration=calibration_of(store, tenant),
        digest=_digest(folder, store.folder / UPPER),
    )


def _shallower(store: Store, folder: Path) -> StoredLevel:
    described, config = TenantFile.read(folder / LEVEL), store.stack(folder.name).config
    adapter: list[Weights] | None = None
    if described.rank:
        adapter = [{} for _ in range(config.upper_layers)]
        for name, tensor in load_weights(folder / "adapter.safetensors").items():
            layer, _, part = name.partition(".")
            adapter[int(layer)][part] = tensor
    return StoredLevel(
        name=folder.name,
        layers=config.upper_layers,
        open=partial(store.stack, folder.name),
        adapter=described.adapter_layout(config),
        head=described.head_layout(config),
        weights=(adapter, load_weights(folder / "head.safetensors")),
        calibration=_calibration(folder / FILE),
        digest=_digest(folder, store.stack_file(folder.name)),
    )


def _calibration(path: Path) -> Calibration | None:
    try:
        return Calibration.read(json.loads(path.read_text("utf-8"))["calibration"])
    except FileNotFoundError:
        return None
    except MISFITS as error:
        raise Broken(f"{path} does not describe a calibration ({error}): {WAY_OUT}") from None


def _digest(folder: Path, stack: Path) -> str:
    files = [path for name in ("adapter", "head") if (path := folder / f"{name}.safetensors").exists()]
    return digest_of(*files, stack)
