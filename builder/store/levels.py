"""The levels of a tenant's version, and the ladder that was chosen for them, beside its weights.

    levels/<stack>/     level.json  adapter.safetensors  head.safetensors  calibration.json  report.json  training.png
    ladder.json         the plans through these levels

A ladder belongs to the levels for which it was chosen. It is removed before one of them changes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from builder.store.calibrations import Calibrated, calibrated_in, write_calibrated
from builder.store.resumable import digest_of, read_json, write_json
from builder.store.store import Store, TenantFile, written_folder
from builder.store.weights import HEAD, Weights, read_adapter, write_weights
from hplm.adapters.layout import Layout
from hplm.errors import MISFITS, Broken, InvalidInput
from hplm.levels.plan import Plan
from hplm.model.config import BackboneConfig
from hplm.model.weights import load_weights

LEVEL, LADDER, LINK, REPORT, PICTURE = "level.json", "ladder.json", "link.json", "report.json", "training.png"
REMOVED = ".removed"  # ends the name of a folder that is being removed
UNFINISHED = (".writing", REMOVED)
WAY_OUT = "build the level again with `hplm cascade build`"
CHOOSE_AGAIN = "choose it again with `hplm cascade select`"


@dataclass(frozen=True)
class LevelFile:
    """`level.json`: the stack of a level, and the form of its adapter and head, with the names of `TenantFile`."""

    stack: str
    layers: int  # of the stack
    digest: str  # of the stack's file
    rank: int
    adapter: str
    places: tuple[str, ...] | None
    function: str
    head_function: str | None
    dtype: str

    @classmethod
    def read(cls, path: Path) -> LevelFile:
        try:
            stored: dict[str, Any] = json.loads(path.read_text("utf-8"))
            level = cls(**{**stored, "places": tuple(stored["places"]) if stored["places"] is not None else None})
            names = level.stack, level.digest, level.adapter, level.function, level.dtype
            if level.head_function is not None:
                names = *names, level.head_function
            if not all(type(name) is str for name in names) or not all(type(one) is int for one in (level.layers, level.rank)):
                raise TypeError("a field has another type")
            return level
        except MISFITS as error:
            raise Broken(f"{path} does not describe a level ({error}): {WAY_OUT}") from None

    def of(self, tenant: TenantFile) -> TenantFile:
        """Returns the tenant with the adapter and head of this level."""
        form = {name: value for name, value in asdict(self).items() if name not in ("stack", "layers", "digest")}
        return replace(tenant, **{**form, "places": self.places})


@dataclass(frozen=True)
class StoredLevel:
    """A level of a tenant's version."""

    file: LevelFile
    folder: Path
    tenant: TenantFile  # with the adapter and head of this level
    config: BackboneConfig  # with the layers of its stack
    calibrated: Calibrated

    @property
    def stack(self) -> str:
        return self.file.stack

    @property
    def adapter_layout(self) -> Layout | None:
        return self.tenant.adapter_layout(self.config)

    @property
    def head_layout(self) -> Layout:
        return self.tenant.head_layout(self.config)

    def weights(self) -> Weights:
        """Returns the adapter by layer, None if the level has none, and the head."""
        head = load_weights(self.folder / HEAD, WAY_OUT)
        return (read_adapter(self.folder, self.config.upper_layers) if self.file.rank else None), head

    def report(self) -> dict[str, Any]:
        return read_json(self.folder / REPORT)


def stack_digest(store: Store, name: str) -> str:
    """Returns a digest of a stack's file."""
    return file_digest(store.stack_file(name))


def file_digest(path: Path) -> str:
    """Returns a digest of a large file, which is read once as long as it stays as it is."""
    found = path.stat()
    return _digest_of(path, found.st_mtime_ns, found.st_size)


@cache
def _digest_of(path: Path, modified: int, size: int) -> str:
    return digest_of(path)


def levels_of(store: Store, tenant: TenantFile) -> list[StoredLevel]:
    """Returns the levels of a tenant's version, the shallowest first. Raises if a level's stack is gone, or is another one."""
    levels = stored_levels(store, tenant)
    for level in levels:
        path = store.stack_file(level.stack)
        if not path.is_file() or stack_digest(store, level.stack) != level.file.digest:
            found = "missing" if not path.is_file() else "another one now"
            raise InvalidInput(
                f"level {level.stack!r} of tenant {tenant.id!r} was trained on {path}, which is {found}: copy that stack "
                f"again, or {WAY_OUT}"
            )
    return levels


def stored_levels(store: Store, tenant: TenantFile) -> list[StoredLevel]:
    """Returns the levels of a tenant's version, the shallowest first, whatever has become of their stacks."""
    levels = [stored_level(store, tenant, name) for name in level_names(store, tenant)]
    return sorted(levels, key=lambda level: (level.file.layers, level.stack))


def level_names(store: Store, tenant: TenantFile) -> list[str]:
    """Returns the names of the stacks on which a tenant's version has levels, in order."""
    folders = (path.parent for path in _levels_folder(store, tenant).glob(f"*/{LEVEL}"))
    return sorted(folder.name for folder in folders if not folder.name.endswith(UNFINISHED))


def stored_level(store: Store, tenant: TenantFile, stack: str) -> StoredLevel:
    folder = _levels_folder(store, tenant) / stack
    file = LevelFile.read(folder / LEVEL)
    calibrated = calibrated_in(folder, len(tenant.labels), WAY_OUT)
    if file.stack != stack or not 1 <= file.layers < store.config.upper_layers:
        raise Broken(f"{folder / LEVEL} describes a level on {file.layers} layers of stack {file.stack!r}: {WAY_OUT}")
    if calibrated is None:
        raise Broken(f"level {stack!r} of tenant {tenant.id!r} has no calibration: {WAY_OUT}")
    return StoredLevel(file, folder, file.of(tenant), replace(store.config, upper_layers=file.layers), calibrated)


def save_level(
    store: Store,
    tenant: TenantFile,
    file: LevelFile,
    weights: Weights,
    calibrated: Calibrated,
    report: dict[str, Any],
    draw: Callable[[Path], object],
) -> None:
    """Saves a level of a tenant's version, and removes the level that it replaces, and the ladder."""
    remove_ladder(store, tenant)
    folder = _levels_folder(store, tenant) / file.stack
    _remove(folder)
    with written_folder(folder) as writing:
        write_weights(writing, *weights)
        write_json(writing / LEVEL, asdict(file))
        write_json(writing / REPORT, report)
        write_calibrated(writing, calibrated)
        draw(writing / PICTURE)


def calibrate_level(store: Store, level: StoredLevel, calibrated: Calibrated) -> None:
    """Replaces the calibration of a level, and removes the ladder: its cutoffs are of the old one."""
    remove_ladder(store, level.tenant)
    write_calibrated(level.folder, calibrated)


def ladder_of(store: Store, tenant: TenantFile) -> tuple[Plan, ...] | None:
    """Returns the plans that were chosen for this version of a tenant, the dearest first; None if none were."""
    path = _ladder_file(store, tenant)
    try:
        stored = json.loads(path.read_text("utf-8"))
        plans, chosen_for = tuple(Plan.read(plan) for plan in stored["plans"]), list(stored["levels"])
    except FileNotFoundError:
        return None
    except MISFITS as error:
        raise Broken(f"{path} does not describe plans ({error}): {CHOOSE_AGAIN}") from None
    stacks = [level.stack for level in stored_levels(store, tenant)]
    if chosen_for != stacks or not all(plan.suits(len(stacks) + 1) for plan in plans):
        raise Broken(f"{path} is for other levels than those of tenant {tenant.id!r}: {CHOOSE_AGAIN}")
    return plans


def save_ladder(store: Store, tenant: TenantFile, plans: Sequence[Plan]) -> None:
    """Saves the plans, the dearest first, with the names of the levels that they count."""
    levels = [level.stack for level in levels_of(store, tenant)]
    write_json(_ladder_file(store, tenant), {"levels": levels, "plans": [asdict(plan) for plan in plans]})


def remove_ladder(store: Store, tenant: TenantFile) -> None:
    """Removes the ladder and the link of a version: their cutoffs are of levels that change now."""
    for path in _chosen_files(store, tenant):
        path.unlink(missing_ok=True)


def has_ladder(store: Store, tenant: TenantFile) -> bool:
    """Whether a version has a ladder or a link."""
    return any(path.exists() for path in _chosen_files(store, tenant))


def _chosen_files(store: Store, tenant: TenantFile) -> list[Path]:
    return [_ladder_file(store, tenant), store.tenant_folder(tenant.id, tenant.version) / LINK]


def _ladder_file(store: Store, tenant: TenantFile) -> Path:
    return store.tenant_folder(tenant.id, tenant.version) / LADDER


def _levels_folder(store: Store, tenant: TenantFile) -> Path:
    return store.tenant_folder(tenant.id, tenant.version) / "levels"


def _remove(folder: Path) -> None:
    """Renames a folder before it removes it, so that a folder with this name is always complete."""
    going = folder.with_name(folder.name + REMOVED)
    shutil.rmtree(going, ignore_errors=True)
    if folder.exists():
        folder.rename(going)
        shutil.rmtree(going)
