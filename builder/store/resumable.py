"""Files that are complete under their names, and what an interrupted build has saved."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hplm.errors import Broken, HplmError

META = "meta.json"
WRITING = ".writing"  # ends the name of what is not complete
PLAN = "plan.json"  # of an unfinished build, in its folder
SECONDS_BETWEEN = 30.0  # two savepoints


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Writes a file under a temporary name; it gets its own name once it is complete and synced. An error removes it."""
    temporary = path.with_name(path.name + WRITING)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: dict) -> None:
    with replaced(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def read_json(path: Path, error: type[HplmError] = Broken, way_out: str = "build or copy it again") -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise error(f"{path} is missing: {way_out}") from None
    except ValueError as wrong:
        raise error(f"{path} is not JSON ({wrong}): {way_out}") from None
    if not isinstance(stored, dict):
        raise error(f"{path} holds no JSON object: {way_out}")
    return stored


def saved_plan(folder: Path) -> dict[str, Any] | None:
    """Returns the plan of an interrupted build; None if there is none, or if it has just ended."""
    try:
        return json.loads((folder / PLAN).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def digest_of(*files: Path) -> str:
    """Returns a short digest of the contents of the files, one after the other."""
    return whole_digest_of(*files)[:12]


def whole_digest_of(*files: Path) -> str:
    content = hashlib.sha256()
    for file in files:
        with open(file, "rb") as opened:
            while block := opened.read(1 << 20):
                content.update(block)
    return content.hexdigest()


def mapped(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """Maps a file as an array. An empty file cannot be mapped and gives an empty array."""
    return np.memmap(path, dtype, "r", shape=shape) if 0 not in shape else np.empty(shape, dtype)


def clear_work_folder(folder: Path) -> None:
    """Removes the folder's content, the plan last: as long as it is there, there may be more."""
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == PLAN, path.name)):
        if path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)


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
