"""A served backbone with all that the engine computes with: its upper layers and the records of its tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hplm.adapters.layout import Layout
from hplm.adapters.records import Records
from hplm.lookup.views import Views
from hplm.model.stacks import UpperStack
from hplm.model.weights import load_weights
from hplm.tenants.snapshot import EXPORT_AGAIN
from hplm.tenants.state_folder import EXPORTED_RECORDS, EXPORTED_UPPER, exported_folders


class Backbone(Views):
    UPPER = EXPORTED_UPPER
    RECORDS = EXPORTED_RECORDS

    def __init__(self, folder: Path, *others: Any, **named: Any) -> None:
        super().__init__(folder, *others, **named)
        self.records = Records(*(place / EXPORTED_RECORDS for place in (folder, *([self.state.folder] if self.state else []))))

    @property
    def layouts(self) -> set[Layout]:
        """The layouts of all records that a ticket may still name."""
        return {Layout.of(key) for view in self._remembered.values() for key in view.snapshot.layouts}

    def upper(self) -> UpperStack:
        upper = UpperStack(self.config)
        upper.load_state_dict(load_weights(self.folder / self.UPPER, EXPORT_AGAIN))
        return upper


def own_threads(folder: Path) -> int:
    """Returns the threads of an engine with `threads` 0: the backbones of a repository divide the server's cores.

    Engines with a thread for each core would disturb each other: while one waits for a thread that has no core, it computes
    nothing.
    """
    return max(1, torch.get_num_threads() // max(1, len(exported_folders(folder.parent.parent))))
