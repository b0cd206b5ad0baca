"""The live state of a backbone, as readers see it: snapshots by generation, and CURRENT, which names the newest.

    snapshots/<generation>   what exists; never changes once it has its name
    CURRENT                  a generation
    readers/<name>           the generation that a reader has taken, written again every second; where readers may write
    plot/  adapters/         tables and banks added since the export
    registry.sqlite          managers only
    aside-<random>/          what a manager copies while others go on; left behind where it died, for a day
"""

from __future__ import annotations

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

EXPORTED_TENANTS, EXPORTED_TABLES, EXPORTED_BANKS = "tenants.json", "plot", "adapters"  # in the model folder
ALIVE_SECONDS = 5.0  # a reader that has not written for so long is gone
UNSEEN_SECONDS = 0.5
PATIENCE = 10.0
ABANDONED_SECONDS = 86_400.0  # longer than any table is copied
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
        for folder in self.folder.glob("aside-*"):
            with suppress(FileNotFoundError):
                if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
        folder = self.folder / f"aside-{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def wait_for_readers(self, generation: int) -> list[str]:
        """Until all have taken it; names those that have not in ten seconds. Readers that may not write are given
        time for two looks."""
        started = time.monotonic()
        while True:
            late = [name for name, taken in self._taken().items() if taken < generation]
            waited = time.monotonic() - started
            if (not late and waited >= UNSEEN_SECONDS) or waited >= PATIENCE:
                return sorted(late)
            time.sleep(0.05)

    def _taken(self) -> dict[str, int]:
        """By reader that is alive."""
        taken = {}
        for file in self.readers.glob("[!.]*"):
            with suppress(FileNotFoundError, ValueError):  # gone, or just being written
                if time.time() - file.stat().st_mtime < ALIVE_SECONDS:
                    taken[file.name] = int(file.read_text("utf-8"))
        return taken

    def load(self, generation: int) -> Snapshot:
        return Snapshot.load(self.snapshots / str(generation))
