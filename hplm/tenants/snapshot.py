"""Snapshots: the served tenants, the tables that they are pinned to, and the records of their adapters and heads.

A snapshot never changes. The exported one is generation 0, `tenants.json` in the model folder.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import msgspec

from hplm.adapters.record import Record
from hplm.calibration import TEMPERATURE, Calibration
from hplm.errors import Broken, InvalidInput, NoTenant
from hplm.plot.table import Branch, BranchId
from hplm.registry.pointer import Pointer
from hplm.registry.store import SNAPSHOTS, Absent, ObjectStore
from hplm.tasks.tasks import TASKS, Task
from hplm.tenants.embedding import Embedding
from hplm.tenants.exits import Exits
from hplm.tenants.keys import Key, by_digest
from hplm.tenants.students import Student, Students

log = logging.getLogger(__name__)
FORMAT = 10
EXPORT_AGAIN = "export the repository again with `hplm export` and --replace"
RESTORE = "restore the registry, or use one version of hplm"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # of tenants, domains and backbones
QUOTAS = ("rate", "burst", "texts_rate", "tokens_rate", "in_flight")
LIMITS = (*QUOTAS, "deadline_us")  # of a tenant; each 0: none
SETTINGS = ("keys", *LIMITS, "homes")  # of a tenant, the same for all its versions


@dataclass(frozen=True, eq=False)
class TenantWeights:
    """The places of all weights of a tenant, or of one of its students, that the upper half needs. A snapshot has each once."""

    head: Record | None
    adapter: Record | None
    exits: Record | None


@dataclass(frozen=True)
class Tenant:
    """One hPLM: a domain, an adapter and a head. A tenant that generates text or makes vectors has no head."""

    id: str
    uid: int
    version: int
    domain: str
    domain_version: int
    task: str
    labels: tuple[str, ...]
    head: Record | None
    adapter: Record | None
    deadline_us: int = 0  # of requests that name none; 0: the backbone's default
    keys: tuple[Key, ...] = ()  # empty: open to everybody
    rate: float = 0.0  # requests a second; 0: no limit
    burst: float = 0.0  # requests at once; 0: as many as in a second, at least one
    texts_rate: float = 0.0  # texts a second; 0: no limit
    tokens_rate: float = 0.0  # tokens a second; 0: no limit
    in_flight: int = 0  # requests in flight; 0: no limit
    homes: int = 1  # replicas that share its quotas: each grants an equal part
    calibration: Calibration | None = None  # of this version's logits; None: its answers have no confidence
    exits: Exits | None = None  # where texts leave whose answers are sure; None: all pass all layers
    students: Students | None = None  # that answer in place of the full stack
    embedding: Embedding | None = field(default=None, repr=False)  # how it makes vectors, if that is its task
    stored: int = 0  # its version in the store, if that was published before and so has another number here

    @cached_property
    def task_object(self) -> Task:
        """The tenant's task. Raises if a later version of hplm wrote the snapshot, with a task that is new."""
        if self.task not in TASKS:
            raise Broken(f"tenant {self.id!r} has the task {self.task!r}, which this server does not know: update hplm here")
        return TASKS[self.task]

    @cached_property
    def weights(self) -> TenantWeights:
        if self.task_object.generates:
            raise InvalidInput(f"tenant {self.id!r} generates text and has no head: ask its backbone to generate")
        return TenantWeights(self.head, self.adapter, self.exits.record if self.exits is not None else None)

    @cached_property
    def student_weights(self) -> tuple[TenantWeights, ...]:
        """The weights of each of its students."""
        members = self.students.members if self.students is not None else ()
        return tuple(TenantWeights(member.head, member.adapter, None) for member in members)

    @property
    def outputs(self) -> int:
        """The numbers in a row of its answer."""
        return self.embedding.dimensions if self.embedding is not None else len(self.labels)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """The expected work of a token by each of its plans, the dearest first: 1.0 is a pass through all layers."""
        if self.students is not None:
            return tuple(team.cost for team in self.students.teams)
        return tuple(plan.cost for plan in self.exits.plans) if self.exits is not None else (1.0,)

    @cached_property
    def keys_by_digest(self) -> dict[str, float]:
        return by_digest(self.keys)

    @property
    def branch_id(self) -> BranchId:
        """The table that it reads first: its domain and version."""
        return self.domain, self.domain_version

    def set_as(self, other: Tenant) -> Tenant:
        """Returns this version with the keys and limits of another one."""
        return replace(self, **{name: getattr(other, name) for name in SETTINGS})

    def with_file(self, file: str) -> Tenant:
        """Returns this version with its weights in another record file of the same content."""

        def moved(record: Record) -> Record:
            return replace(record, file=file)

        exits, students = self.exits, self.students
        if exits is not None and exits.record is not None:
            exits = replace(exits, record=moved(exits.record))
        if students is not None:
            members = (Student(moved(one.head), moved(one.adapter)) for one in students.members)
            students = replace(students, members=tuple(members))
        head, adapter = (None if one is None else moved(one) for one in (self.head, self.adapter))
        return replace(self, head=head, adapter=adapter, exits=exits, students=students)

    def records(self) -> list[Record]:
        exits = self.exits.record if self.exits is not None else None
        members = [record for own in self.student_weights for record in (own.head, own.adapter)]
        return [record for record in (self.head, self.adapter, exits, *members) if record is not None]


@dataclass(frozen=True)
class Ledger:
    """What managers know besides what is served."""

    next_uid: int  # no uid, version or address is used twice, because slots and tickets may still name deleted ones
    next_address: int
    last_versions: dict[str, int] = field(default_factory=dict[str, int])  # of tenants that were rolled back, by id
    before: tuple[Tenant, ...] = ()  # the version that each tenant can be rolled back to
    resting: tuple[tuple[str, float], ...] = ()  # names that requests may still need, and until when (Unix time)
    swept: float = 0.0  # when somebody last looked for what interrupted changes have left (Unix time)
    change: dict[str, Any] = field(default_factory=dict[str, Any])  # what made this generation: when, who, action and details


class Snapshot:
    def __init__(
        self, generation: int, branches: Sequence[Branch], tenants: Sequence[Tenant], export: str, ledger: Ledger | None = None
    ) -> None:
        self.generation = generation
        self.export = export  # the name of the export that this snapshot and all later ones belong to
        self.branches = tuple(branches)
        self.tenants = tuple(tenants)
        self.ledger = ledger or Ledger(max((tenant.uid for tenant in tenants), default=0) + 1, 0)
        self._by_id = {tenant.id: tenant for tenant in tenants}
        self._by_uid = {tenant.uid: tenant for tenant in tenants}

    @cached_property
    def export_number(self) -> int:
        """The export's name as a number of 64 bits, for tickets."""
        return int.from_bytes(hashlib.sha256(self.export.encode()).digest()[:8], "little")

    def find(self, tenant_id: str | None) -> Tenant:
        tenant = self._by_id.get(tenant_id) if tenant_id is not None else None
        if tenant is None:
            raise NoTenant
        return tenant

    @cached_property
    def open_rows(self) -> bytes:
        """The rows, in JSON, of the tenants that answer everybody, by name. Each list of tenants has them."""
        return listed_rows(sorted((tenant for tenant in self.tenants if not tenant.keys), key=lambda tenant: tenant.id))

    @cached_property
    def by_digest(self) -> dict[str, list[Tenant]]:
        """The tenants by the digests of their keys, which may have expired.

        How long it takes to find one tells nothing: nobody can choose the digest of a secret.
        """
        found: dict[str, list[Tenant]] = {}
        for tenant in self.tenants:
            for digest in {key.digest for key in tenant.keys}:
                found.setdefault(digest, []).append(tenant)
        return found

    def by_uid(self, uid: int) -> Tenant:
        tenant = self._by_uid.get(uid)
        if tenant is None:
            raise NoTenant
        return tenant

    @cached_property
    def layouts(self) -> frozenset[str]:
        """The keys of the layouts of all records."""
        return frozenset(record.layout for tenant in self.tenants for record in tenant.records())

    def written(self) -> bytes:
        stored = {
            "format": FORMAT,
            "generation": self.generation,
            "export": self.export,
            "tables": self.branches,
            "tenants": [_unusual_fields(tenant) for tenant in self.tenants],
            "ledger": {**_unusual_fields(self.ledger), "before": [_unusual_fields(tenant) for tenant in self.ledger.before]},
        }
        return msgspec.json.encode(stored)

    def save(self, path: Path) -> None:
        """Replaces a file, of which there may be links. Not synced."""
        temporary = path.with_name(path.name + ".writing")
        temporary.write_bytes(self.written())
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path, way_out: str = EXPORT_AGAIN) -> Snapshot:
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            raise InvalidInput(f"{path} is missing: {way_out}") from None
        return cls.read(stored, path, way_out)

    @classmethod
    def read(cls, text: bytes, place: object, way_out: str = EXPORT_AGAIN) -> Snapshot:
        """Returns the snapshot that a file contains. Error messages name its place and end with the way out."""
        try:
            found = msgspec.json.decode(text, type=_Format).format
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Broken(f"{place} is not JSON with a format ({error}): {way_out}") from None
        if found != FORMAT:
            raise InvalidInput(f"{place} has format {found!r}, but this version of hplm reads {FORMAT}: {way_out}")
        try:
            stored = msgspec.json.decode(text, type=_Stored)
            before = msgspec.json.decode(stored.ledger.pop("before", b"[]"), type=list[msgspec.Raw])
            ledger = msgspec.json.decode(msgspec.json.encode(stored.ledger), type=Ledger)
            ledger = replace(ledger, before=tuple(_decoded(before, "ledger.before")))
            tenants = list(_decoded(stored.tenants, "tenants"))
        except (msgspec.ValidationError, TypeError, UnicodeDecodeError) as error:
            raise Broken(f"{place} does not describe tenants and tables ({error}): {way_out}") from None
        return cls(stored.generation, stored.tables, tenants, stored.export, ledger)


def newest_of(store: ObjectStore, pointer: Pointer, exported: Snapshot) -> Snapshot:
    """Returns the snapshot that CURRENT names, of the registry of an export."""
    if not pointer.generation:
        return exported
    name = f"{SNAPSHOTS}/{pointer.snapshot}"
    try:
        snapshot = Snapshot.read(store.get(name), f"{store}/{name}", RESTORE)
    except Absent as error:
        raise Broken(f"{error}: restore the registry") from None
    if snapshot.export != exported.export:
        raise InvalidInput(
            f"{store} belongs to another export: name the repository that it was made for, or go on from it in another --state "
            "with `hplm begin --from`"
        )
    return snapshot


def files_of(tenants: Iterable[Tenant]) -> set[str]:
    """Returns the names of all record files of tenants."""
    return {record.file for tenant in tenants for record in tenant.records()}


class _Format(msgspec.Struct):
    format: Any


class _Stored(msgspec.Struct):
    generation: int
    export: str
    tables: tuple[Branch, ...]
    tenants: list[msgspec.Raw]
    ledger: dict[str, msgspec.Raw]


_TENANT = msgspec.json.Decoder(Tenant)


def _decoded(stored: Sequence[msgspec.Raw], where: str) -> Iterator[Tenant]:
    """Yields tenants. Other threads run between two of them: one call for thousands would keep all requests waiting."""
    for number, one in enumerate(stored):
        try:
            yield checked(_TENANT.decode(one))
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(f"{where}[{number}]: {error}") from None


def _unusual_fields(one: Any) -> dict[str, Any]:
    """Returns the fields that are not as most are: at thousands of tenants, a snapshot is half as large."""
    return {name: value for name, usual in _usual(one.__class__) if (value := getattr(one, name)) != usual}


@cache
def _usual(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the name and the default of each field."""
    return tuple((own.name, own.default) for own in fields(kind))


def checked(tenant: Tenant) -> Tenant:
    """Returns the tenant, without calibrations of another version of hplm. Raises TypeError if it would fail later."""
    if tenant.homes < 1:
        raise TypeError(f"tenant {tenant.id!r} has no homes")
    if tenant.calibration is not None and tenant.calibration.kind != TEMPERATURE:
        _warn_of_kind(tenant.id, "calibration", tenant.calibration.kind)
        tenant = replace(tenant, calibration=None)
    if tenant.exits is not None and tenant.exits.other_kind is not None:
        _warn_of_kind(tenant.id, "exits", tenant.exits.other_kind)
        tenant = replace(tenant, exits=None)
    if tenant.calibration is not None:
        tenant.calibration.check()
    if tenant.exits is not None:
        tenant.exits.check()
        if tenant.exits.record is None or tenant.task_object.same is None:
            raise TypeError(f"tenant {tenant.id!r} has the exits of another tenant")
    if tenant.task in TASKS and (tenant.embedding is not None) != tenant.task_object.is_vector:
        raise TypeError(f"tenant {tenant.id!r} has the embedding of another tenant")
    if tenant.students is not None:
        tenant.students.check()
        is_able = tenant.exits is None and tenant.task_object.takes_students
        if not is_able or len(tenant.students.members) != tenant.students.teams[0].members:
            raise TypeError(f"tenant {tenant.id!r} has the students of another tenant")
    return tenant


@cache
def _warn_of_kind(tenant_id: str, what: str, kind: str) -> None:
    """Warns once for each tenant: its snapshots are read again and again."""
    log.warning(
        "tenant %s is served without its %s of kind %r, which this release does not have: `hplm tenant update` removes them",
        tenant_id, what, kind,
    )  # fmt: skip


def listed_rows(tenants: Iterable[Tenant]) -> bytes:
    """Returns the rows of a list of tenants, in JSON, without the list's brackets."""
    return b",".join(msgspec.json.encode(listed_row(tenant)) for tenant in tenants)


def listed_row(tenant: Tenant) -> dict[str, Any]:
    row: dict[str, Any] = {"tenant": tenant.id, "task": tenant.task}
    if tenant.embedding is not None:
        row |= {"dimensions": tenant.embedding.dimensions, "prefixes": [*tenant.embedding.prefixes]}
    return row
