"""The live state of a backbone, as readers see it: snapshots by generation, and CURRENT, which names the newest.

    snapshots/<generation>   what exists; never changes once it has its name
    CURRENT                  a generation
    plot/  adapters/         tables and banks added since the export
    registry.sqlite          managers only
"""

from __future__ import annotations

from pathlib import Path

from hplm.errors import Broken
from hplm.tenants.snapshot import Snapshot


class State:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables = folder / "plot"
        self.banks = folder / "adapters"
        self.snapshots = folder / "snapshots"
        self.current_file = folder / "CURRENT"
        self.registry = folder / "registry.sqlite"

    def current(self) -> int:
        """The newest generation; 0, the export itself, before anything was changed."""
        try:
            return int(self.current_file.read_text("utf-8"))
        except FileNotFoundError:
            return 0
        except ValueError:
            raise Broken(f"{self.current_file} does not hold the number of a generation: restore the state") from None

    def load(self, generation: int) -> Snapshot:
        return Snapshot.load(self.snapshots / str(generation))
