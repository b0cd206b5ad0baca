"""The records of a copy. They lie in banks of its own, at places of its own.

A record is known by the uid and the version of its tenant and by its part: its number among the tenant's records. This never
names other weights, because no version is used twice. A bank has records of one layout and one part. So a place that names a
uid and a version never means other weights than before, and readers may keep what they have read from it.
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from hplm.adapters.bank import PAGE, Bank, is_sound, layout_in, packed_owner, record_bytes, write_bank, write_packed
from hplm.adapters.layout import Layout
from hplm.adapters.record import Record
from hplm.errors import Broken, HplmError
from hplm.follow.source import Away, Source
from hplm.follow.troubles import LATER
from hplm.tenants.snapshot import LIVE, Tenant
from hplm.tenants.state import REST_SECONDS, State

log = logging.getLogger(__name__)
RUN_BYTES = 4 << 20  # the most bytes that one request brings
WAY_OUT = "check the state of the source with `hplm verify`"
_NAME = re.compile(r".+\.part(\d+)\.g\d+\.bank")


@dataclass(frozen=True, order=True)
class Piece:
    """A record of a tenant, wherever it lies."""

    uid: int
    version: int
    part: int


class Unlike(Broken):
    """A record of the source belongs to another tenant, or does not match its checksum."""


def pieces(tenant: Tenant) -> dict[Piece, Record]:
    """Returns the tenant's records that lie in a live state."""
    numbered = enumerate(tenant.records())
    return {Piece(tenant.uid, tenant.version, part): record for part, record in numbered if record.bank.startswith(LIVE)}


class Records:
    """The banks of a copy. One thread owns them."""

    def __init__(self, state: State, tenants: Iterable[Tenant], clock: Callable[[], float] = time.monotonic) -> None:
        """`tenants`: of the copy's newest snapshot."""
        self._state = state
        self._clock = clock
        self.brought = 0  # grows with every record that is brought
        self._layouts: dict[str, Layout] = {}  # of the source's banks; a name is never used twice there
        self._banks: dict[tuple[Layout, int], str] = {}  # the copy's bank of each layout and part
        self._places: dict[Piece, Record] = {}  # sound records that are here
        self._taken: dict[str, set[int]] = defaultdict(set)  # the places of each bank that must not be overwritten
        self._until: dict[Piece, float] = {}  # when the place of a record that nothing names any more is free
        self._failed: dict[Record, tuple[float, HplmError]] = {}  # records of the source that are tried again at a time
        self._unknown: dict[str, set[int]] = {}  # places that readers may use, from before this process
        self._unknown_until = clock() + REST_SECONDS
        self._open(tenants)

    def _open(self, tenants: Iterable[Tenant]) -> None:
        banks: dict[str, Bank] = {}
        for path in sorted(self._state.banks.glob("*.bank")):
            found = _NAME.fullmatch(path.name)
            try:
                bank = banks[LIVE + path.name] = Bank(path)
            except HplmError as error:  # its records are brought again, into another one
                log.warning("skipping a broken bank: %s", error)
                continue
            if found:
                self._banks[bank.layout, int(found[1])] = LIVE + path.name
        for tenant in tenants:
            for piece, record in pieces(tenant).items():
                bank = banks.get(record.bank)
                if bank and record.index < bank.records and bank.owner(record.index) == (piece.uid, piece.version):
                    self._places[piece] = record
                    self._taken[record.bank].add(record.index)
        for name, bank in banks.items():
            self._unknown[name] = set(range(bank.records)) - self._taken[name]
            self._taken[name] |= self._unknown[name]

    def moved(self, tenant: Tenant) -> Tenant | None:
        """Returns a tenant of the source with its records' places here. None: some are not here."""
        places: dict[Record, Record] = {}
        for piece, record in pieces(tenant).items():
            if piece not in self._places:
                return None
            places[record] = self._places[piece]
        return tenant.moved(places)

    def missing(self, tenants: Iterable[Tenant]) -> dict[Piece, Record]:
        """Returns the records that are not here, with their places at the source."""
        return {piece: record for tenant in tenants for piece, record in pieces(tenant).items() if piece not in self._places}

    def bring(self, source: Source, backbone: str, missing: Mapping[Piece, Record], seconds: float, generation: int) -> None:
        """Brings missing records for so many seconds. A record that cannot be brought holds up no other one.

        `generation`: the one that will name them, for the names of new banks.
        """
        now = self._clock()
        until = now + seconds
        self._failed = {record: found for record, found in self._failed.items() if found[0] > now}
        for name in sorted({record.bank for record in missing.values()}):
            here = {piece: record for piece, record in missing.items() if record.bank == name and record not in self._failed}
            if here and self._clock() <= until:
                self._bring_bank(source, backbone, name, here, until, generation)
        for record in missing.values():
            if record in self._failed:
                raise self._failed[record][1]

    def _bring_bank(
        self, source: Source, backbone: str, name: str, missing: Mapping[Piece, Record], until: float, generation: int
    ) -> None:
        """Brings records of one bank of the source. Remembers those that cannot be brought."""
        path = f"{backbone}/adapters/{name.removeprefix(LIVE)}"
        try:
            if name not in self._layouts:
                self._layouts[name] = layout_in(source.read(path, 0, PAGE), f"bank {source.address}/{path}", WAY_OUT)
            layout = self._layouts[name]
            size = record_bytes(layout)
            for run in _runs(missing, RUN_BYTES // size):
                if self._clock() > until:
                    return
                packed = source.read(path, PAGE + run[0][1].index * size, len(run) * size)
                cut = {found: packed[number * size :][:size] for number, found in enumerate(run)}
                self._keep(layout, cut, f"{source.address}/{path}", generation)
        except Away:
            raise
        except HplmError as error:
            self._fail(missing.values(), error)

    def _keep(self, layout: Layout, packed: Mapping[tuple[Piece, Record], bytes], url: str, generation: int) -> None:
        """Writes the records that are as they have to be."""
        by_part: dict[int, dict[Piece, bytes]] = defaultdict(dict)
        for (piece, record), content in packed.items():
            if packed_owner(content) != (piece.uid, piece.version):
                self._fail([record], Unlike(f"record {record.index} of {url} belongs to another tenant or version: {WAY_OUT}"))
            elif not is_sound(content, layout):
                self._fail([record], Unlike(f"record {record.index} of {url} does not match its checksum: {WAY_OUT}"))
            else:
                by_part[piece.part][piece] = content
        for part, records in by_part.items():
            self._write(layout, part, records, generation)

    def _fail(self, records: Iterable[Record], error: HplmError) -> None:
        self._failed |= {record: (self._clock() + LATER, error) for record in records if record not in self._failed}

    def _write(self, layout: Layout, part: int, records: Mapping[Piece, bytes], generation: int) -> None:
        name = self._bank(layout, part, generation)
        taken = self._taken[name]
        free = (index for index in count() if index not in taken)
        places = dict(zip(records, free, strict=False))
        write_packed(self._state.bank(name), {places[piece]: record for piece, record in records.items()})
        for piece, index in places.items():
            self.brought += 1
            taken.add(index)
            self._places[piece] = Record(name, index, piece.uid, piece.version)

    def _bank(self, layout: Layout, part: int, generation: int) -> str:
        """Returns the bank for records of this layout and part. Begins one if there is none."""
        name = self._banks.get((layout, part))
        if name is None or not self._state.bank(name).exists():
            self._state.banks.mkdir(parents=True, exist_ok=True)
            name = f"{LIVE}{layout.name}.part{part}.g{generation}.bank"
            write_bank(self._state.bank(name), layout, [])
            self._banks[layout, part] = name
        return name

    def rest(self, tenants: Iterable[Tenant]) -> None:
        """Frees the places of records that none of these tenants has had for a minute, and removes banks without records.

        `tenants`: of the copy's newest snapshot, and of the source's, which the next one will have.
        """
        now = self._clock()
        named = {piece for tenant in tenants for piece in pieces(tenant)}
        for piece in self._places.keys() & named & self._until.keys():
            del self._until[piece]
        for piece in self._places.keys() - named:
            if self._until.setdefault(piece, now + REST_SECONDS) <= now:
                del self._until[piece]
                record = self._places.pop(piece)
                self._taken[record.bank].discard(record.index)
        if self._unknown and self._unknown_until <= now:
            for name, places in self._unknown.items():
                self._taken[name] -= places
            self._unknown = {}
        for path in self._state.banks.glob("*") if not self._unknown else ():
            if not self._taken.get(LIVE + path.name):
                path.unlink()


def _runs(records: Mapping[Piece, Record], most: int) -> Iterator[list[tuple[Piece, Record]]]:
    """Yields the records of a bank in groups that lie side by side, of `most` records each (at least one)."""
    run: list[tuple[Piece, Record]] = []
    for piece, record in sorted(records.items(), key=lambda found: found[1].index):
        if run and (record.index != run[-1][1].index + 1 or len(run) >= most):
            yield run
            run = []
        run.append((piece, record))
    if run:
        yield run
