"""Opens, writes and compacts the banks of a live state."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from hplm.adapters.bank import Bank, write_bank, write_record
from hplm.adapters.layout import Layout
from hplm.adapters.record import Record
from hplm.errors import Broken, HplmError
from hplm.tenants.registry import Change
from hplm.tenants.snapshot import LIVE
from hplm.tenants.state import State

log = logging.getLogger(__name__)
WAY_OUT = "restore the state with `hplm restore`, or its tenants with `hplm tenant update`"


def open_bank(state: State, name: str) -> Bank:
    """Opens a bank of a live state, by its name in records."""
    return Bank(state.bank(name), WAY_OUT)


class Banks:
    def __init__(self, state: State) -> None:
        self._state = state

    def put(self, change: Change, layout: Layout, uid: int, version: int, layers: Sequence[Mapping[str, Tensor]]) -> Record:
        """Writes a record into a bank of this layout, over a free record or at the end. Starts a bank if there is none."""
        self._state.banks.mkdir(parents=True, exist_ok=True)
        flat = layout.pack(layers)
        for path in sorted(self._state.banks.glob("*.bank")):
            try:
                bank = open_bank(self._state, path.name)
            except HplmError as error:  # a broken bank is neither served nor changed
                log.warning("skipping a broken bank: %s", error)
                continue
            if bank.layout != layout:
                continue
            taken = change.records_of(LIVE + path.name)
            index = next((i for i in range(bank.records) if i not in taken), bank.records)
            write_record(path, layout, index, uid, version, flat)
            change.take(record := Record(LIVE + path.name, index, uid, version))
            return record
        path = self._state.banks / _file_name(layout, change)
        if change.records_of(LIVE + path.name):
            raise Broken(f"cannot read bank {path}, which this change has started: run the command again")
        write_bank(path, layout, [(uid, version, flat)])
        change.take(record := Record(LIVE + path.name, 0, uid, version))
        return record

    def compact(self, change: Change) -> int:
        """Copies the records in use into new banks without holes. Returns the number of moved records."""
        tenants = (*change.tenants.values(), *change.before.values())
        used = {record for tenant in tenants for record in tenant.records() if record.bank.startswith(LIVE)}
        banks = {name: open_bank(self._state, name) for name in {record.bank for record in used}}
        by_layout: dict[Layout, list[Record]] = defaultdict(list)
        for record in sorted(used, key=lambda record: (record.bank, record.index)):
            by_layout[banks[record.bank].layout].append(record)
        moved: dict[Record, Record] = {}
        for layout, kept in by_layout.items():
            if kept[0].bank == kept[-1].bank and len(kept) == banks[kept[0].bank].records:  # one bank without holes
                continue
            entries: list[tuple[int, int, Tensor]] = []
            for record in kept:
                flat = layout.empty()
                banks[record.bank].read(record, flat)
                entries.append((record.uid, record.version, flat))
            target = _file_name(layout, change)
            write_bank(self._state.banks / target, layout, entries)
            moved |= {old: replace(old, bank=LIVE + target, index=i) for i, old in enumerate(kept)}
        for known in (change.tenants, change.before):
            for tenant_id, tenant in known.items():
                known[tenant_id] = tenant.moved(moved)
        return len(moved)

    def size(self) -> int:
        """Returns the bytes of all banks on disk."""
        return sum(file.stat().st_size for file in self._state.banks.glob("*"))


def _file_name(layout: Layout, change: Change) -> str:
    """Returns a new name for a bank. It is never used twice, because readers keep banks open by name."""
    return f"{layout.name}.g{change.generation}.bank"
