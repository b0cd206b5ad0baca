"""Computed answers that are kept by digest in the folder of a tenant's version, so that no level is computed twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from builder.cascade.answering import Computed
from builder.store.resumable import replaced

FOLDER = "profile"


class Kept:
    def __init__(self, version_folder: Path, shared: Mapping[str, Any], folder: str = FOLDER) -> None:
        """`shared`: what all answers depend on."""
        self._folder = version_folder / folder
        self._shared = shared
        self._used: set[Path] = set()

    def __call__(self, compute: Callable[[], Computed], **own: Any) -> Computed:
        """Returns the answers that `own` describes, computed now or earlier."""
        digest = hashlib.sha256(json.dumps({**self._shared, **own}, sort_keys=True).encode()).hexdigest()[:16]
        path = self._folder / f"{digest}.npz"
        self._used.add(path)
        if (found := _read(path)) is not None:
            return found
        found = compute()
        self._folder.mkdir(exist_ok=True)
        with replaced(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **{name: array for part in ("logits", "received") for name, array in _flat(part, found).items()})
        return found

    def sweep(self) -> None:
        """Removes answers that were not wanted since this was made: they are of other texts or of older levels."""
        for path in self._folder.glob("*.npz*"):
            if path not in self._used:
                path.unlink()


def _flat(part: str, found: Computed) -> dict[str, np.ndarray]:
    arrays: list[np.ndarray] = getattr(found, part)
    return {part: np.concatenate(arrays), f"{part}_lengths": np.array([len(own) for own in arrays])}


def _read(path: Path) -> Computed | None:
    """Returns None if nothing readable is there: then it is computed again."""
    try:
        with np.load(path) as stored:
            parts = [np.split(stored[part], np.cumsum(stored[f"{part}_lengths"])[:-1]) for part in ("logits", "received")]
    except (OSError, ValueError, KeyError, BadZipFile):
        return None
    return Computed(*parts)
