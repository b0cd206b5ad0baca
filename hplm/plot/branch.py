"""A table's place in the forest. No torch here: the alias only follows snapshots and starts without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Branch:
    """A table's domain and version, which name its folder under `plot/`, and its first address."""

    domain: str
    version: int
    base: int

    @property
    def folder(self) -> str:
        return f"{self.domain}/{self.version}"
