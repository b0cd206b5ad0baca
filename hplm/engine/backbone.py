"""A served backbone with all that the engine computes with: its upper layers, and the banks of its views."""

from __future__ import annotations

import logging

from hplm.adapters.bank import WAY_OUT, Bank
from hplm.adapters.layout import Layout
from hplm.engine.views import View, Views
from hplm.errors import Broken, HplmError
from hplm.model.stacks import UpperStack
from hplm.model.weights import load_weights
from hplm.tenants.banks import open_bank
from hplm.tenants.snapshot import LIVE, Snapshot
from hplm.tenants.state import EXPORTED_BANKS, EXPORTED_UPPER

log = logging.getLogger(__name__)


class Backbone(Views):
    UPPER = EXPORTED_UPPER
    BANKS = EXPORTED_BANKS

    @property
    def layouts(self) -> set[Layout]:
        """The layouts of all banks that a ticket may still name."""
        return {bank.layout for view in self._remembered for bank in view.banks.values()}

    def upper(self) -> UpperStack:
        upper = UpperStack(self.config)
        upper.load_state_dict(load_weights(self.folder / self.UPPER, WAY_OUT))
        return upper

    def bank(self, name: str) -> Bank:
        if name.startswith(LIVE):
            if self.state is None:
                raise Broken(f"bank {name} is in a live state, but no state was given: start with --state")
            return open_bank(self.state, name)
        return Bank(self.folder / self.BANKS / name)

    def _banks(self, snapshot: Snapshot, before: View | None) -> dict[str, Bank]:
        """Opens all banks that can be opened. A broken bank fails only requests of its own tenants, when they arrive."""
        banks: dict[str, Bank] = {}
        for name in snapshot.banks():
            try:
                banks[name] = (before.banks.get(name) if before is not None else None) or self.bank(name)
            except HplmError as error:
                log.error("%s", error)
        return banks
