"""A level of a tenant: its adapter, head and calibration on an upper stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hplm.adapters.record import Record
from hplm.levels.calibration import Calibration

FULL = ""  # the stack of a tenant's own level: the backbone's whole upper stack


@dataclass(frozen=True)
class Level:
    stack: str  # the name of an upper stack
    head: Record
    adapter: Record | None
    calibration: Calibration | None  # None only in a tenant's own level

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Level:
        """Reads what `asdict` has written. Raises TypeError or KeyError if a field is missing or of another type."""
        level = cls(
            stack=entry["stack"],
            head=Record(**entry["head"]),
            adapter=Record(**entry["adapter"]) if entry["adapter"] is not None else None,
            calibration=Calibration.read(entry["calibration"]),
        )
        if type(level.stack) is not str or level.stack == FULL:
            raise TypeError("a level has no name of a stack")
        return level

    def records(self) -> list[Record]:
        return [record for record in (self.head, self.adapter) if record is not None]

    def moved(self, moved: Mapping[Record, Record]) -> Level:
        """Returns the level with its records in other places."""
        adapter = moved.get(self.adapter, self.adapter) if self.adapter is not None else None
        return replace(self, head=moved.get(self.head, self.head), adapter=adapter)
