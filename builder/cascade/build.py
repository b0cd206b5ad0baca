"""Builds levels of a tenant: an adapter and a head on each of some shallower stacks, trained and calibrated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from builder.cascade.material import LevelMaterial
from builder.evaluation.calibration import PURPOSE, asked_of, calibrated_on
from builder.evaluation.tenant import find_tenant
from builder.evaluation.unseen import UnseenTexts
from builder.store.calibrations import Calibrated, read_calibrated, save_calibrated
from builder.store.levels import (
    LevelFile,
    StoredLevel,
    calibrate_level,
    has_ladder,
    level_names,
    save_level,
    stack_digest,
    stored_level,
)
from builder.store.resumable import write_json
from builder.store.store import Store, TenantFile, check_name
from builder.store.weights import Weights
from builder.tables.build_folder import PLAN, held
from builder.training.bodies import PlotBody
from builder.training.finetuning import Trained, TrainingOptions, adapter_of, train
from builder.training.learning_curve import draw_training
from builder.training.start import form_of, say
from hplm.engine.engine import Precision
from hplm.errors import Broken, InvalidInput

FORM = ("adapter", "rank", "places", "function", "head_function", "dtype")


@dataclass(frozen=True)
class BuiltLevel:
    level: StoredLevel
    is_trained: bool  # now; otherwise it was there
    is_calibrated: bool


@dataclass(frozen=True)
class Built:
    tenant: TenantFile
    is_calibrated: bool  # its own level; otherwise it was
    levels: list[BuiltLevel]


def build_levels(
    store: Store,
    tenant_id: str,
    stacks: Sequence[str],
    calibrate_texts: Path,
    precision: Precision,
    device: torch.device,
    seen: Sequence[Path] = (),
    soft_labels: bool = False,
    show_progress: bool = True,
    **training: Any,
) -> Built:
    """Trains and calibrates a level of the tenant's newest version on each of these stacks, the shallowest first.

    `training`: `TrainingOptions`; the others are as the version was trained. `calibrate_texts` also calibrates the tenant
    itself, if it is not. `seen`: files of its training that were moved, and more whose texts are left out of the calibration.
    `soft_labels`: levels also learn the logits of the tenant's own level. The same call after an interruption continues. After
    it has ended, the same call changes nothing.
    """
    check_name("tenant", tenant_id)
    layers = {name: store.stack(name).config.upper_layers for name in stacks}
    working = store.tenant_work_folder(tenant_id)
    with held(working, f"tenant {tenant_id!r}"):
        tenant = find_tenant(store, tenant_id)
        texts = UnseenTexts(store, tenant, calibrate_texts, seen, PURPOSE)
        material = LevelMaterial(store, tenant, seen, device, show_progress)
        options = options_of(store, tenant, training)
        own = read_calibrated(store, tenant)
        if is_new := own is None:
            weights = store.tenant_weights(tenant)
            own = calibrated_on(store, tenant, weights, texts, precision, device, None, show_progress)
            save_calibrated(store, tenant, own)
        delta = own.calibration.delta or None
        builder = _Builder(store, tenant, material, texts, options, soft_labels, precision, device, delta, show_progress)
        shallow_first = sorted(layers, key=lambda name: (layers[name], name))
        levels = [builder.build(name, layers[name], working / f"level-{name}") for name in shallow_first]
        return Built(tenant, is_new, levels)


def options_of(store: Store, tenant: TenantFile, given: dict[str, Any]) -> TrainingOptions:
    """Returns the given options, with those of the version's own training and its form for what they leave open."""
    known, report = TrainingOptions.__dataclass_fields__, store.report(tenant)
    learned = {name: report[name] for name in known if name in report and name not in FORM}
    options = TrainingOptions(**{**learned, **form_of(tenant, given)})
    if options.body_rate and not options.cut:
        raise InvalidInput("--upper-rate needs an adapter that holds the change of the upper layers: give --rank above 0")
    adapter_of(store.config, options)  # refuses unknown projections and kinds before anything is trained
    return options


@dataclass(frozen=True)
class _Builder:
    """Builds the levels of one version, one after the other."""

    store: Store
    tenant: TenantFile
    material: LevelMaterial
    texts: UnseenTexts
    options: TrainingOptions
    soft_labels: bool
    precision: Precision
    device: torch.device
    delta: float | None  # the largest error of a right number
    show_progress: bool

    def build(self, stack: str, layers: int, working: Path) -> BuiltLevel:
        """Builds a level, or what it lacks. `working`: a folder for the savepoint of its training."""
        store, tenant = self.store, self.tenant
        asked = self._asked(stack)
        level = self._whole(stack)
        is_trained = level is None or level.report().get("asked") != asked
        is_calibrated = level is None or level.calibrated.asked != asked_of(self.texts, self.precision, self.delta)
        if is_trained or is_calibrated:
            self.texts.check()
            if has_ladder(store, tenant):
                say(f"tenant {tenant.id}: its ladder was for other levels and is removed; `hplm cascade select` chooses one")
        if is_trained:
            file = LevelFile(
                stack, layers, stack_digest(store, stack), self.options.rank, self.options.adapter, self.options.worked_on,
                self.options.function, self.options.head_function, self.options.dtype,
            )  # fmt: skip
            trained = self._trained(stack, working, asked)
            weights = trained.model.stored()
            calibrated = self._calibrated(file, weights)
            report = {
                "stack": stack,
                "layers": layers,
                "soft_labels": self.soft_labels,
                **self._report(trained),
                "asked": asked,
            }
            title = f"{tenant.id} version {tenant.version}: {tenant.task} on {tenant.domain}, level {stack}"
            save_level(store, tenant, file, weights, calibrated, report, partial(draw_training, report, title))
        elif is_calibrated and level is not None:
            calibrate_level(store, level, self._calibrated(level.file, level.weights()))
        shutil.rmtree(working, ignore_errors=True)
        return BuiltLevel(stored_level(store, tenant, stack), is_trained, is_trained or is_calibrated)

    def _whole(self, stack: str) -> StoredLevel | None:
        """Returns the level that was built before; None if there is none, or if it is broken."""
        if stack not in level_names(self.store, self.tenant):
            return None
        try:
            level = stored_level(self.store, self.tenant, stack)
            level.weights()
            level.report()
        except Broken as error:
            say(f"{error}; it is built again now")
            return None
        return level

    def _asked(self, stack: str) -> dict[str, Any]:
        """Returns what a level is made of, as a file returns it."""
        store, tenant = self.store, self.tenant
        asked = {
            "version": tenant.version,
            "stack": stack_digest(store, stack),
            "tables": store.chain_digest(tenant.domain, tenant.domain_version),
            "data": self.material.digests,
            "soft_labels": self.soft_labels,
            **asdict(self.options),
        }
        return json.loads(json.dumps(asked))

    def _trained(self, stack: str, working: Path, asked: dict[str, Any]) -> Trained:
        if not (working / PLAN).exists() or json.loads((working / PLAN).read_text("utf-8")) != asked:
            shutil.rmtree(working, ignore_errors=True)
            working.mkdir()
            write_json(working / PLAN, asked)
        upper = self.store.stack(stack)
        body, ground = PlotBody(upper, upper.config.heads), self.material.ground(upper.config)
        further = self.material.soft_labels if self.soft_labels else None
        return train(body, ground, self.options, working / "training.pt", self.show_progress, further)

    def _calibrated(self, file: LevelFile, weights: Weights) -> Calibrated:
        form, upper = file.of(self.tenant), self.store.stack(file.stack)
        return calibrated_on(
            self.store, form, weights, self.texts, self.precision, self.device, self.delta, self.show_progress, upper
        )

    def _report(self, trained: Trained) -> dict[str, Any]:
        ground = self.material.ground(self.store.config)
        counts = {"texts": len(ground.texts.examples), "texts_cut": ground.texts.cut, "windows_found": ground.texts.found}
        return {
            "training": counts,
            "dev": {"texts": len(ground.dev.examples), **trained.scores.described()},
            **trained.report,
        }
