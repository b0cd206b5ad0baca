"""Files that are written together and can be continued after the process was killed at any point."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.said import say
from hplm.errors import Broken, HplmError, InvalidInput

META = "meta.json"
PROGRESS = "progress.json"
PLAN = "plan.json"  # of an unfinished build, in its folder
SECONDS_BETWEEN = 30.0  # two savepoints


class ResumableFiles(ExitStack):
    """`meta.json` is written last and marks the folder as complete. Until then `progress.json` holds the valid file sizes."""

    def __init__(self, folder: Path, names: Sequence[str], task: dict[str, Any], start: dict[str, Any]) -> None:
        """`task`: describes the work; a continued run must give the same one. `start`: the progress of a new run."""
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.done, self._task = folder, start, task
        sizes = dict.fromkeys(names, 0)
        if (folder / PROGRESS).exists():
            recorded = read_json(folder / PROGRESS)
            check_task(folder, recorded["task"], task)
            self.done, sizes = recorded["done"], recorded["sizes"]
        self._files = {name: self.enter_context(open(folder / name, "ab")) for name in names}  # noqa: SIM115
        for name, file in self._files.items():
            if file.tell() < sizes[name]:
                raise InvalidInput(f"{folder / name} is shorter than {PROGRESS} says: remove {folder} and start again")
            file.truncate(sizes[name])
        self.record()

    def append(self, name: str, array: np.ndarray) -> None:
        np.ascontiguousarray(array).tofile(self._files[name])

    def record(self, **done: Any) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.done = self.done | done
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}
        write_json(self.folder / PROGRESS, {"task": self._task, "done": self.done, "sizes": sizes})

    def finish(self, meta: dict) -> None:
        write_json(self.folder / META, meta)
        (self.folder / PROGRESS).unlink()


def is_finished(folder: Path, task: dict) -> bool:
    if not (folder / META).exists():
        return False
    meta = read_json(folder / META)
    check_task(folder, {name: meta.get(name) for name in task}, task)
    (folder / PROGRESS).unlink(missing_ok=True)  # a process died right after its last step
    return True


def check_task(folder: Path, begun: dict, asked: dict) -> None:
    for name, value in asked.items():
        if begun.get(name) != value:
            raise InvalidInput(
                f"{folder} was begun with {name} {begun.get(name)}, not {value}: remove it, or choose another folder"
            )


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Writes a file under a temporary name; it gets its own name once it is complete and synced."""
    temporary = path.with_name(path.name + ".writing")
    yield temporary
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


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


def begun_plan(folder: Path) -> dict[str, Any] | None:
    """Returns the plan of an interrupted build; None if there is none, or if it has just ended."""
    try:
        return json.loads((folder / PLAN).read_text("utf-8"))
    except FileNotFoundError:
        return None


def digest_of(*files: Path) -> str:
    """Returns a short digest of the contents of the files, one after the other."""
    content = hashlib.sha256()
    for file in files:
        with open(file, "rb") as opened:
            while block := opened.read(1 << 20):
                content.update(block)
    return content.hexdigest()[:12]


def mapped(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """Maps a file as an array. An empty file cannot be mapped and gives an empty array."""
    return np.memmap(path, dtype, "r", shape=shape) if 0 not in shape else np.empty(shape, dtype)


def savepoints_of(folder: Path, part: str, asked: dict[str, Any]) -> Path:
    """Returns where a part of a tenant has its savepoints, beside those of an interrupted training, which stay."""
    own = folder / f"{part}-{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]}"
    if any(path != own for path in folder.glob(f"{part}-*")):
        say(f"tenant {folder.name}: the interrupted {part} had other data or options: what was learned is removed")
        remove_savepoints(folder, part, own)
    own.mkdir(exist_ok=True)
    write_json(own / PLAN, asked)
    return own


def remove_savepoints(folder: Path, part: str, kept: Path | None = None) -> None:
    """Removes those of a part that is done, or of what was asked otherwise."""
    for path in folder.glob(f"{part}-*"):
        if path != kept:
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
