"""The names that a labelled file's columns have, where they are not those of its task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Columns:
    """Columns of a table, or fields of JSON lines. They stand in this order in a task's form of a line."""

    text_column: str | None = None
    """column with the text (default: as in the tenant's training, or text; of tag: tokens)"""
    pair_column: str | None = None
    """column with the second text (default: as in the tenant's training, or text_pair)"""
    label_column: str | None = None
    """column with the label (default: as in the tenant's training, or label, labels, tags or answers)"""

    @property
    def given(self) -> dict[str, str]:
        return {name: column for name, column in asdict(self).items() if column is not None}

    def after(self, report: Mapping[str, Any]) -> Columns:
        """Returns the names with those of the training that has this report, where none is given."""
        return Columns(**{**report.get("asked", {}).get("columns", {}), **self.given})


AS_TRAINED = Columns()
