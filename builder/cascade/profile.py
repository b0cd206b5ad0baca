"""A profile: what the plans of a tenant's version score and cost. It is `profile.json` beside the version's weights."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from builder.cascade.candidates import Candidate
from builder.cascade.levels import OpenLevel
from builder.cascade.selection import front_of
from builder.cascade.sheet_times import SheetTimes
from builder.store.resumable import write_json
from builder.store.store import Store, TenantFile
from hplm.errors import MISFITS, Broken
from hplm.levels.plan import Plan

FILE = "profile.json"
FORMAT = 3  # of a profile: one of an earlier version is made again


@dataclass(frozen=True)
class Profile:
    plans: list[Candidate]  # those that no other plan of the same levels beats
    asked: dict[str, Any]  # digests of the texts and the levels, and the precision
    report: dict[str, Any]

    @cached_property
    def front(self) -> list[Candidate]:
        """The plans that no other one beats, the dearest first."""
        return self.front_within(self.names)

    def front_within(self, names: Collection[str]) -> list[Candidate]:
        """Returns the front of the plans that need no other levels than these and the tenant's own one."""
        last = len(self.names) - 1
        usable = {last, *(number for number, name in enumerate(self.names) if name in names)}
        return front_of((one for one in self.plans if usable >= {step.level for step in one.plan.steps}), last)

    @property
    def own_alone(self) -> Candidate:
        """The tenant's own level alone."""
        last = len(self.names) - 1
        return next(one for one in self.plans if [step.level for step in one.plan.steps] == [last])

    @cached_property
    def times(self) -> list[SheetTimes]:
        """By level: the seconds of its sheets."""
        return [SheetTimes.read(level["sheets"]) for level in self.report["levels"]]

    @property
    def names(self) -> list[str]:
        """The names of the levels, the shallowest first."""
        return [level["name"] for level in self.report["levels"]]

    @property
    def own(self) -> float:
        """The score of the tenant's own level."""
        return self.report["levels"][-1]["score"]

    @property
    def measured_in(self) -> str:
        """The precision and the device of its times."""
        return f"{self.asked['precision']} on {self.asked['device']}"

    def is_of(self, levels: Sequence[OpenLevel]) -> bool:
        """Whether these levels were profiled: none was built or calibrated again since."""
        return self.asked["levels"] == described(levels)


def described(levels: Sequence[OpenLevel]) -> list[list[Any]]:
    """Returns what a profile depends on: of each level its name, its weights and its calibration, in the form of JSON."""
    early = [level.calibration for level in levels[:-1]]  # nothing follows from how sure the last one is
    calibrations = [asdict(one) if one is not None else None for one in [*early, None]]
    stored = [[level.name, level.digest, own] for level, own in zip(levels, calibrations, strict=True)]
    return json.loads(json.dumps(stored))


def read_profile(store: Store, tenant: TenantFile) -> Profile | None:
    """Returns the profile of this version of a tenant; None if it has none, or one that an earlier version of hPLM has made."""
    path = _path(store, tenant)
    try:
        stored = json.loads(path.read_text("utf-8"))
        asked = dict(stored["asked"])
        if asked.get("format") != FORMAT:
            return None
        found = Profile([_candidate(entry) for entry in stored["plans"]], asked, dict(stored["report"]))
        _check(found)
    except FileNotFoundError:
        return None
    except MISFITS as error:
        raise Broken(f"{path} does not describe a profile ({error}): remove it, and run `hplm cascade profile`") from None
    return found


def _candidate(stored: Mapping[str, Any]) -> Candidate:
    read = {"plan": Plan.read(stored["plan"]), "shares": tuple(stored["shares"]), "error": stored["error"]}
    return Candidate(**{**stored, **read})


def _check(profile: Profile) -> None:
    """Raises one of MISFITS if something that a selection reads is missing, or of another type."""
    if not profile.plans or not all(one.plan.suits(len(profile.names)) for one in profile.plans):
        raise TypeError("it has no plans, or plans of other levels")
    if not all(len(one.shares) == len(one.plan.steps) for one in profile.plans):
        raise TypeError("its plans have not as many shares as steps")
    numbers = [
        number for one in profile.plans for number in (one.score, one.mean, one.tail, one.pruned, one.error, *one.shares)
    ]
    numbers += [level[name] for level in profile.report["levels"] for name in ("score", "mean_ms")]
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise TypeError("it holds something other than finite numbers")
    if not all(type(name) is str for name in (*profile.names, profile.report["metric"])) or "levels" not in profile.asked:
        raise TypeError("its levels or its metric have no names")
    if not all(type(profile.asked[name]) is str for name in ("precision", "device")):
        raise TypeError("its precision or its device is no word")
    alone = [len(profile.names) - 1]
    if alone not in [[step.level for step in one.plan.steps] for one in profile.plans] or not profile.times:
        raise TypeError("it lacks the tenant's own level alone, or the times of sheets")


def save_profile(store: Store, tenant: TenantFile, profile: Profile) -> None:
    content = {"asked": profile.asked, "report": profile.report, "plans": [asdict(one) for one in profile.plans]}
    write_json(_path(store, tenant), content)


def _path(store: Store, tenant: TenantFile) -> Path:
    return store.tenant_folder(tenant.id, tenant.version) / FILE
