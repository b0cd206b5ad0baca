"""A step that makes the next version of a tenant: the same call goes on after an interruption, and then changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from builder.console import say
from builder.store.resumable import PLAN, clear_work_folder, saved_plan, write_json
from builder.store.store import Store

ADDED = ("calibration", "exits", "students")  # to a version that stays: its report has a part for each


class Step:
    def __init__(self, store: Store, tenant_id: str, kind: str, inputs: Mapping[str, Any]) -> None:
        """`kind`: the name of its folder, and of its part of a report. `inputs`: all that changes what is made."""
        self.inputs: dict[str, Any] = json.loads(json.dumps(inputs))  # as a file returns it
        before = store.tenant(tenant_id)
        self._report = store.report(before) if before is not None else {}
        self._kind, self._saving = kind, store.tenant_work_folder(tenant_id) / kind
        self.saved_plan = saved_plan(self._saving)  # by an interrupted call

    def done(self, is_meant: Callable[[dict[str, Any]], bool] = lambda report: True) -> dict[str, Any] | None:
        """Returns what the step has reported if it has made the newest version. Removes what a kill at its end has left.

        `is_meant`: asked of the report.
        """
        stored = self._report.get(self._kind, {}) if self._kind in ADDED else self._report
        if stored.get("asked") != self.inputs or not is_meant(stored):
            return None
        self.clear()
        return stored["report"] if self._kind in ADDED else stored

    def folder(self, *, free: Mapping[str, Any] | None = None, **plan: Any) -> Path:
        """Returns the folder of its savepoints, and removes those of another plan.

        `plan`: what they depend on beside `inputs`. `free`: more of the plan, which may have changed since.
        """
        plan, free = {**plan, **self.inputs}, free or {}
        self._saving.mkdir(exist_ok=True)
        if self.saved_plan is None or {**self.saved_plan, **free} != {**plan, **free}:
            if self.saved_plan is not None:
                what = f"tenant {self._saving.parent.name}: the interrupted {self._kind}"
                say(f"{what} had other data or options: what was learned is removed")
            clear_work_folder(self._saving)
        write_json(self._saving / PLAN, {**plan, **free})
        return self._saving

    def finish(self, step_report: Mapping[str, Any], save: Callable[[dict[str, Any]], object], without: str = "") -> None:
        """Saves the version by `save`, which gets its report, and removes the savepoints.

        `step_report`: the report of this step. `without`: another one, whose result the version lacks.
        """
        own = {"asked": self.inputs, **({"report": step_report} if self._kind in ADDED else step_report)}
        kept = {name: part for name, part in self._report.items() if name != without}
        save({**kept, self._kind: own} if self._kind in ADDED else own)
        self.clear()

    def clear(self) -> None:
        """Removes the savepoints."""
        if self._saving.exists():
            clear_work_folder(self._saving)
            self._saving.rmdir()
