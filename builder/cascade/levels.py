"""The levels of a tenant, ready to be computed, as a profile needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from builder.store.calibrations import calibration_of
from builder.store.levels import StoredLevel, levels_of
from builder.store.resumable import digest_of
from builder.store.stacks import UPPER
from builder.store.store import Store, TenantFile
from builder.store.weights import ADAPTER, HEAD, Weights
from hplm.adapters.layout import Layout
from hplm.errors import InvalidInput
from hplm.levels.calibration import Calibration
from hplm.model.stacks import UpperStack

OWN = "own"  # the name that reports give a tenant's own level


@dataclass(frozen=True)
class OpenLevel:
    name: str  # of its stack; OWN: the full one
    layers: int
    open: Callable[[], UpperStack]  # reads the stack
    adapter: Layout | None
    head: Layout
    weights: Weights
    calibration: Calibration | None  # None only of the tenant's own level
    digest: str  # of the files that its logits depend on


def open_levels(store: Store, tenant: TenantFile) -> list[OpenLevel]:
    """Returns the levels of this version of a tenant, the shallowest first. Its own one is the last."""
    if not tenant.has_head:
        raise InvalidInput(f"tenant {tenant.id!r} generates text: only answers of encoders have levels")
    return [*(_shallower(store, level) for level in levels_of(store, tenant)), own(store, tenant)]


def own(store: Store, tenant: TenantFile) -> OpenLevel:
    return OpenLevel(
        name=OWN,
        layers=store.config.upper_layers,
        open=store.upper,
        adapter=tenant.adapter_layout(store.config),
        head=tenant.head_layout(store.config),
        weights=store.tenant_weights(tenant),
        calibration=calibration_of(store, tenant),
        digest=_digest(store.tenant_folder(tenant.id, tenant.version), store.folder / UPPER),
    )


def _shallower(store: Store, level: StoredLevel) -> OpenLevel:
    return OpenLevel(
        name=level.stack,
        layers=level.file.layers,
        open=partial(store.stack, level.stack),
        adapter=level.adapter_layout,
        head=level.head_layout,
        weights=level.weights(),
        calibration=level.calibrated.calibration,
        digest=_digest(level.folder, store.stack_file(level.stack)),
    )


def _digest(folder: Path, stack: Path) -> str:
    return digest_of(*(path for name in (ADAPTER, HEAD) if (path := folder / name).exists()), stack)
