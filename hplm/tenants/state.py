"""The live state of a backbone, as readers see it: snapshots by generation, and CURRENT, which names the newest.

snapshots/<generation>   what exists; never changes once it has its name
CURRENT                  a generation
readers/<name>           the generation that a reader has taken, written again every second; where readers may write
plot/  adapters/         tables and banks added since the export
registry.sqlite          managers only
aside-<random>/          what a manager copies while others go on; left behind where it was killed, until the next change
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hplm.adapters.bank import Bank
from hplm.errors import Broken
from hplm.tenants.snapshot import LIVE, Snapshot

# What an exported model folder holds.
EXPORTED_CONFIG, EXPORTED_TOKENIZER, EXPORTED_UPPER = "backbone.json", "tokenizer.json", "upper.safetensors"
EXPORTED_TENANTS, EXPORTED_TABLES, EXPORTED_BANKS = "tenants.json", "plot", "adapters"
SECONDS_BETWEEN_LOOKS = 0.2  # of a reader for a newer generation
ALIVE_SECONDS = 5.0  # a reader that has not written for so long is gone
UNSEEN_SECONDS = 0.5
SILENT_SECONDS = 1.5  # longer than from one word of a reader to the next
STILL_SECONDS = 0.25  # from one look to the next; if it was longer, nobody else could do anything either
PATIENCE = 10.0
NEW_SECONDS = 10.0  # between making a folder and holding it
WAY_OUT = "bring the state back with `hplm restore`, or the tenants in it with `hplm tenant update`"


class Reader:
    """Says which generation one process has taken; removed when it ends."""

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
        """The newest generation; 0, the export itself, before anything was changed."""
        try:
            return int(self.current_file.read_text("utf-8"))
        except FileNotFoundError:
            return 0
        except ValueError:
            raise Broken(f"{self.current_file} does not hold the number of a generation: restore the state") from None

    def has(self, generation: int) -> bool:
        """The last ones are kept, whatever has been published since."""
        return (self.snapshots / str(generation)).exists()

    def bank(self, name: str) -> Path:
        """By the name that records have."""
        return self.banks / name.removeprefix(LIVE)

    def open_bank(self, name: str) -> Bank:
        return Bank(self.bank(name), WAY_OUT)

    @contextmanager
    def aside(self) -> Iterator[Path]:
        """A folder on the same file system, in which nobody tidies up meanwhile."""
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
        """Removes what managers left behind that were killed: nobody holds it."""
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
        """Until all have taken it; names those that have not in ten seconds. Readers that may not write are given
        time for two looks, and those that are silent for a word: where the machine stood still, all of them were."""
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
        """Readers that have not taken it, and whether they have been silent for so long that they are gone."""
        behind = {}
        for file in self.readers.glob("[!.]*"):
            with suppress(FileNotFoundError, ValueError):  # gone, or just being written
                if int(file.read_text("utf-8")) < generation:
                    behind[file.name] = time.time() - file.stat().st_mtime >= ALIVE_SECONDS
        return behind

    def load(self, generation: int) -> Snapshot:
        return Snapshot.load(self.snapshots / str(generation))
