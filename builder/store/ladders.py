"""The ladder of a tenant's version: `ladder.json` beside its weights, which may be replaced, as its calibration may."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builder.store.resumable import write_json
from builder.store.store import Store, TenantFile
from hplm.errors import MISFITS, Broken
from hplm.levels.plan import Plan

FILE = "ladder.json"


@dataclass(frozen=True)
class Ladder:
    """Plans of one tenant version, the dearest first."""

    levels: tuple[str, ...]  # the stacks of the levels that the plans speak of, without the tenant's own one
    plans: tuple[Plan, ...]
    asked: dict[str, Any]  # the target, and the profile that it was chosen from


def read_ladder(store: Store, tenant: TenantFile) -> Ladder | None:
    """Returns the ladder of this version of a tenant; None if it has none."""
    path = _path(store, tenant)
    try:
        stored = json.loads(path.read_text("utf-8"))
        plans = tuple(Plan.read(plan) for plan in stored["plans"])
        found = Ladder(tuple(str(name) for name in stored["levels"]), plans, dict(stored["asked"]))
        if not plans or not all(plan.suits(len(found.levels) + 1) for plan in plans):
            raise TypeError("its plans speak of other levels")
    except FileNotFoundError:
        return None
    except MISFITS as error:
        raise Broken(f"{path} does not describe a ladder ({error}): run `hplm cascade select` again, or remove it") from None
    return found


def save_ladder(store: Store, tenant: TenantFile, ladder: Ladder) -> None:
    plans = [asdict(plan) for plan in ladder.plans]
    write_json(_path(store, tenant), {"levels": ladder.levels, "plans": plans, "asked": ladder.asked})


def _path(store: Store, tenant: TenantFile) -> Path:
    return store.tenant_folder(tenant.id, tenant.version) / FILE
