"""Makes the exits of a tenant's newest version from texts, which need no labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.console import say
from builder.evaluation.evaluation import opened
from builder.evaluation.unseen import UnseenTexts
from builder.exits.answers import answered_by, calibration_by, calibrations_for, lost_by
from builder.exits.heads import MOST_ROWS, learned, outputs_of, states_of
from builder.exits.thresholds import Chosen, chosen
from builder.learning.limits import check_seed
from builder.store.step import Step
from builder.store.store import Store, TenantVersion
from builder.tables.build_folder import locked_tenant
from builder.tasks.columns import AS_TRAINED, Columns
from builder.tasks.examples import Example, hash_of, read_unlabelled
from builder.training.data import file_of
from hplm.adapters.layout import exit_layout
from hplm.calibration import Calibration
from hplm.engine.engine import Precision
from hplm.errors import InvalidInput
from hplm.tenants.exits import Exits
from hplm.tenants.knowledge import ExitKnowledge

PURPOSE = "choosing when texts leave"
LEARN = 0.5  # of the given texts, if there is no file of the tenant's training, as after an import
DROPS = (1.0, 2.0, 4.0)  # points that plans may lose, the dearest first
NO_EXITS = {  # tasks, and why
    "span": "answers with pieces of passages, and has no exits: all windows of a passage would have to leave together, and an "
    "answer may lie in any of them",
    "regress": "answers with numbers, and has no exits: nothing tells how sure a number is",
    "embed": "makes vectors, and has no exits: those of different layers cannot be compared",
    "generate": "generates text, and has no exits: later tokens attend to what all layers have computed",
}


def build_exits(
    store: Store, tenant_id: str, file: Path, precision: Precision, device: torch.device, drops: Sequence[float] = DROPS,
    seed: int = 0, columns: Columns = AS_TRAINED,
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """Stores a next version with exits. Returns the report, and whether they are new: the same call again changes nothing.

    The heads learn from the texts of the tenant's training, and `file` chooses when texts leave. After an interruption, heads
    that have learned do not learn again. `drops`: points that each plan may lose.
    """
    with locked_tenant(store, tenant_id):
        tenant = store.known_tenant(tenant_id)
        check_task(tenant.id, tenant.task)
        if not drops or any(not 0 <= drop <= 100 for drop in drops) or list(drops) != sorted(drops):
            raise InvalidInput(f"drops {', '.join(map(str, drops))}: give points from 0 to 100, the smallest first")
        check_seed(seed)
        report = store.report(tenant)
        # No weight has learned from dev.
        seen, own = store.seen(tenant).learned, columns.after(report)
        texts = UnseenTexts(tenant, file, seen, PURPOSE, with_labels=False, columns=own)
        before = store.knowledge(tenant)
        asked = {
            "texts": texts.digest, "precision": precision.name, "drops": list(drops), "seed": seed,
            "calibration": before.calibration is not None and before.calibration.temperature,
        }  # fmt: skip
        step = Step(store, tenant_id, "exits", asked)
        if (known := step.done()) is not None:
            return known, False
        task = texts.task.unlabelled()
        learned_from, choosing = _divided(report, tenant, texts)
        learning, judged = (
            states_of(*opened(store, before, own, device, precision, task), most)
            for own, most in ((learned_from, MOST_ROWS), (choosing, None))
        )
        layout = exit_layout(store.config, len(tenant.labels), tenant.dtype)
        folder = step.folder(version=tenant.version, learned=len(learned_from))
        heads = learned(learning, layout, task, seed, folder)
        outputs = [outputs_of(head, layout, own) for head, own in zip(heads, judged.exits, strict=True)]
        full = before.calibration
        if full is None and texts.is_labelled and task.served.read_each is not None:
            full = calibration_by(choosing, tenant.labels, judged.logits)
        full = full or Calibration()
        calibrations = calibrations_for(task, outputs, judged.logits, full)
        answered, answers = answered_by(tenant, task, judged, outputs, calibrations, full, store.config)
        plans = chosen(answered, drops)
        kept = [plan for number, plan in enumerate(plans) if not number or plan.plan.cost < plans[number - 1].plan.cost]
        told = [described(one) for one in kept]
        if texts.is_labelled:
            for plan, one in zip(told, kept, strict=True):
                plan["lost"] = lost_by(task, choosing, answers, one.exits)
        own = {
            "tenant": tenant.id, "version": tenant.version + 1, "task": tenant.task, "file": str(file),
            "learned_texts": len(learning.rows_of), "texts": len(judged.rows_of), "precision": precision.name,
            "plans": told,
        }  # fmt: skip
        exits = ExitKnowledge(Exits(None, tuple(calibrations), tuple(one.plan for one in kept)), layout, heads)
        step.finish(own, partial(store.save_next, tenant, replace(before, exits=exits, students=None)), without="students")
        return own, True


def check_task(tenant_id: str, task: str) -> None:
    """Refuses tasks that have no exits."""
    if (why := NO_EXITS.get(task)) is not None:
        raise InvalidInput(f"tenant {tenant_id!r} {why}")


def _divided(report: Mapping[str, Any], tenant: TenantVersion, texts: UnseenTexts) -> tuple[list[Example], list[Example]]:
    """Returns the texts that the heads learn from, and those that choose when texts leave."""
    if (training := report.get("training")) is not None:  # of an import there is none
        if (file := file_of(training)) is not None:
            return [*read_unlabelled(file, AS_TRAINED.after(report), texts.task.line)], texts.fresh
        say(f"tenant {tenant.id}: {training['file']} was moved or changed, so the exits learn from half of {texts.file}")
    different = list(dict.fromkeys(map(hash_of, texts.fresh)))  # the same text is not in both parts
    if len(different) < 2:
        raise InvalidInput(f"{texts.file}: all texts are the same: give different ones, of which half are learned")
    order = np.random.default_rng(0).permutation(len(different)).tolist()
    learned = {different[number] for number in order[: round(LEARN * len(order))]}
    learning, choosing = ([one for one in texts.fresh if (hash_of(one) in learned) == learns] for learns in (True, False))
    return learning, choosing


def described(one: Chosen) -> dict[str, Any]:
    plan, loss = one.plan, one.loss
    return {
        "cost": plan.cost, "exit": plan.exit, "leaves": plan.leaves, "agrees": one.agrees, "expected_loss": loss.points,
        "expected_loss_off": loss.off,
    }  # fmt: skip
