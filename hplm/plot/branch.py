"""A table's place in the forest. No torch here: the alias only follows snapshots and starts without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Branch:
    """A table's domain and version, and its first address."""

    domain: str
    version: int
    base: int
    unique: str = ""  # a part of its folder's name: no name is used twice; an export has none

    @property
    def place(self) -> tuple[str, int]:
        return self.domain, self.version

    @property
    def folder(self) -> str:
        """Its folder under `plot/`."""
        return f"{self.domain}/{self.version}{self.unique}"
