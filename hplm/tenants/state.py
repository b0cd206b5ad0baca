"""The live state of a backbone, as readers see it: snapshots by generation, and CURRENT, which names the newest.

snapshots/<generation>   a snapshot; it never changes after it was renamed to its final name
CURRENT                  the newest generation
readers/<name>           the generation that a reader has taken, written again every second if the reader may write
plot/  adapters/         tables and banks added since the export
registry.sqlite          for managers only
aside-<random>/          files that a manager copies before its change; if it is killed, the next change removes them
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from hplm.errors import Broken
from hplm.tenants.snapshot import LIVE, Snapshot

# The names in an exported model folder.
EXPORTED_CONFIG, EXPORTED_TOKENIZER, EXPORTED_UPPER = "backbone.json", "tokenizer.json", "upper.safetensors"
EXPORTED_STACKS = "stacks"  # the folder of the shorter upper stacks, which may be missing
EXPORTED_TENANTS, EXPORTED_TABLES, EXPORTED_BANKS = "tenants.json", "plot", "adapters"
SECONDS_BETWEEN_LOOKS = 0.2  # how often a reader looks for a newer generation
ALIVE_SECONDS = 5.0  # a reader that has not written its file for so long is silent: it may have ended
UNSEEN_SECONDS = 0.5  # how long to wait for readers that may not write
SILENT_SECONDS = 1.5  # how long to wait for silent readers: longer than the interval at which a reader writes
STILL_SECONDS = 0.25  # the most time that counts between two checks: if more has passed, the whole machine was stopped
PATIENCE = 10.0  # how long to wait for readers that are not silent
NEW_SECONDS = 10.0  # the most time between making a folder and locking it


class Reader:
    """A file with the generation that one process has taken. It is removed when the process ends."""

    def __init__(self, state: State) -> None:
        self._file = state.readers / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._said = -1
        self._at = 0.0

    def say(self, generation: int) -> None:
        if generation == self._said and time.monotonic() - self._at < 1.0:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._file.with_name(f".{self._file.name}")
        fresh.write_text(f"{generation}\n", "utf-8")
        fresh.replace(self._file)
        self._said, self._at = generation, time.monotonic()

    def close(self) -> None:
        with suppress(OSError):
            self._file.unlink()


class State:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables = folder / "plot"
        self.banks = folder / "adapters"
        self.snapshots = folder / "snapshots"
        self.current_file = folder / "CURRENT"
        self.readers = folder / "readers"
        self.registry = folder / "registry.sqlite"

    def current(self) -> int:
        """Returns the newest generation. Before the first change this is 0, the export itself."""
        try:
            return int(self.current_file.read_text("utf-8"))
        except FileNotFoundError:
            return 0
        except ValueError:
            raise Broken(f"{self.current_file} does not contain the number of a generation: restore the state") from None

    def has(self, generation: int) -> bool:
        """Whether the snapshot of a generation exists. Only the last generations are kept."""
        return (self.snapshots / str(generation)).exists()

    def bank(self, name: str) -> Path:
        """Returns the file of a bank, by its name in records."""
        return self.banks / name.removeprefix(LIVE)

    @contextmanager
    def aside(self) -> Generator[Path, None, None]:
        """Makes a temporary folder on the same file system, and locks it so that no other manager removes it."""
        self.sweep_aside()
        folder = self.folder / f"aside-{secrets.token_hex(4)}"
        folder.mkdir()
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)

    def sweep_aside(self) -> None:
        """Removes the temporary folders of killed managers: those that no process locks."""
        for folder in self.folder.glob("aside-*"):
            with suppress(FileNotFoundError, BlockingIOError):
                if time.time() - folder.stat().st_mtime < NEW_SECONDS:
                    continue
                held = os.open(folder, os.O_RDONLY)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(held)

    def wait_for_readers(self, generation: int) -> list[str]:
        """Waits until all readers have taken the generation. Returns the names of late readers after ten seconds.

        Readers that may not write get the time to look twice for a new generation. Silent readers get the time to write once
        more, because the whole machine may have been stopped.
        """
        waited, looked = 0.0, time.monotonic()
        while True:
            behind = self._behind(generation)
            late = sorted(name for name, silent in behind.items() if not silent)
            if waited >= PATIENCE or (not late and waited >= (SILENT_SECONDS if behind else UNSEEN_SECONDS)):
                return late
            time.sleep(0.05)
            now = time.monotonic()
            waited, looked = waited + min(now - looked, STILL_SECONDS), now

    def _behind(self, generation: int) -> dict[str, bool]:
        """Returns the readers that have not taken the generation. The value says whether a reader is silent."""
        behind: dict[str, bool] = {}
        for file in self.readers.glob("[!.]*"):
            with suppress(FileNotFoundError, ValueError):  # removed, or being written just now
                if int(file.read_text("utf-8")) < generation:
                    behind[file.name] = time.time() - file.stat().st_mtime >= ALIVE_SECONDS
        return behind

    def load(self, generation: int) -> Snapshot:
        return Snapshot.load(self.snapshots / str(generation))
