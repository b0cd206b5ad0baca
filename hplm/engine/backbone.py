"""A served backbone with all that the engine computes with: its layers and the records of its tenants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hplm.adapters.layout import Layout
from hplm.adapters.records import Records
from hplm.location import Location
from hplm.lookup.views import Views
from hplm.model.cpu import apart
from hplm.model.stacks import LowerStack, UpperStack
from hplm.model.weights import load_stack, load_weights, without_weights
from hplm.plot.table import Table
from hplm.tenants.snapshot import EXPORT_AGAIN
from hplm.tenants.state_folder import EXPORTED_RECORDS, EXPORTED_UPPER, exported_folders

CPU = torch.device("cpu")
WORDS = "words.weight"  # as the file has them: a window reads a few of them


class Backbone(Views):
    UPPER = EXPORTED_UPPER
    RECORDS = EXPORTED_RECORDS

    def __init__(
        self,
        folder: Path,
        state: Location | None = None,
        prepare: Callable[[Table], object] = lambda _: None,
        device: torch.device = CPU,
        **named: Any,
    ) -> None:
        """`device`: of a decoder's lower layers. They are opened with their tables."""
        self._device = device
        self._lower = WeakKeyDictionary[Table, LowerStack]()
        super().__init__(folder, state, lambda table: (self._open_lower(table), prepare(table)), **named)
        self.records = Records(*(place / EXPORTED_RECORDS for place in (folder, *([self.state.folder] if self.state else []))))

    @property
    def layouts(self) -> set[Layout]:
        """The layouts of all records that a ticket may still name."""
        return {Layout.of(key) for view in self._remembered.values() for key in view.snapshot.layouts}

    def upper(self, dtype: torch.dtype = torch.float32) -> UpperStack:
        return load_stack(UpperStack, self.config, self.folder / self.UPPER, EXPORT_AGAIN, dtype)

    def lower(self, table: Table) -> LowerStack | None:
        """Returns the layers that compute what a decoder's table lacks; None if they did not come with it."""
        return self._lower.get(table)

    def _open_lower(self, table: Table) -> None:
        if table.lower.exists():
            apart(partial(self._load_lower, table))  # in this thread, OpenMP's threads would stay and slow the engine's down

    def _load_lower(self, table: Table) -> None:
        """Loads the lower layers. Those of several domains share the weights that are equal."""
        weights = {
            name: weight.to(self._device, weight.dtype if name == WORDS else torch.float32)
            for name, weight in load_weights(table.lower, EXPORT_AGAIN).items()
        }
        for other in list(self._lower.values()):
            weights |= {name: own for name, own in other.state_dict().items() if torch.equal(own, weights[name])}
        with without_weights():
            lower = LowerStack(self.config)
        lower.load_state_dict(weights, assign=True)
        self._lower[table] = lower.eval().requires_grad_(False)


def own_threads(folder: Path) -> int:
    """Returns the threads of an engine with `threads` 0: the backbones of a repository divide the server's cores.

    Engines with a thread for each core would disturb each other: while one waits for a thread that has no core, it computes
    nothing.
    """
    return max(1, torch.get_num_threads() // max(1, len(exported_folders(folder.parent.parent))))
