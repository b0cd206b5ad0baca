"""The savepoint of a long computation: one file, replaced from time to time, from which it continues."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from builder.store.resumable import replaced

SECONDS_BETWEEN = 30.0


class Savepoint:
    def __init__(self, path: Path | None) -> None:
        """`path` None: nothing is saved."""
        self._path = path
        self._last = time.monotonic()

    @property
    def due(self) -> bool:
        return self._path is not None and time.monotonic() - self._last >= SECONDS_BETWEEN

    def load(self) -> dict[str, Any] | None:
        """Returns the saved state. It holds only tensors, numbers and names: loading it runs no code."""
        if self._path is None or not self._path.exists():
            return None
        return torch.load(self._path, weights_only=True, map_location="cpu")

    def save(self, state: dict[str, Any]) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(self._path) as temporary:
            torch.save(state, temporary)
        self._last = time.monotonic()
