"""Snapshots: the served tenants, the tables that they are pinned to, and the records of their adapters and heads.

A snapshot never changes after it was renamed to its final name. The exported one is generation 0, `tenants.json` in the model
folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hplm.adapters.record import Record
from hplm.errors import MISFITS, Broken, InvalidInput, NoTenant
from hplm.levels.calibration import Calibration
from hplm.levels.plan import MOST_RUNGS, Plan, Step
from hplm.plot.branch import Branch
from hplm.tasks import TASKS, Task
from hplm.tenants.keys import Key
from hplm.tenants.level import FULL, Level
from hplm.tenants.link import Link

FORMAT = 8
READABLE = (2, 3, 4, 5, 6, 7, FORMAT)  # docs/formats.md says what the earlier ones lack
EXPORT_AGAIN = "export the repository again"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # of tenants, domains and backbones
LIVE = "state/"  # prefix of the names of banks in the live state
PROMISES = ("first_token_us", "token_us")  # limits that only a tenant that generates text may have
QUOTAS = ("rate", "burst", "texts_rate", "tokens_rate", "in_flight")
LIMITS = (*QUOTAS, "deadline_us", *PROMISES)  # of a tenant; each 0: none


@dataclass(frozen=True)
class Tenant:
    """One hPLM: a domain, an adapter and a head. A tenant that generates text has no head."""

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
    first_token_us: int = 0  # until the first token; 0: the backbone's default
    token_us: int = 0  # between two tokens; 0: the backbone's default
    keys: tuple[Key, ...] = ()  # empty: open to everybody
    rate: float = 0.0  # requests a second; 0: no limit
    burst: float = 0.0  # requests at once; 0: as many as in a second, at least one
    texts_rate: float = 0.0  # texts a second; 0: no limit
    tokens_rate: float = 0.0  # tokens a second; 0: no limit
    in_flight: int = 0  # requests in flight; 0: no limit
    homes: int = 1  # replicas that share its quotas: each grants an equal part
    calibration: Calibration | None = None  # of this version's logits; None: its answers have no confidence
    levels: tuple[Level, ...] = ()  # on shallower stacks, the shallowest first
    ladder: tuple[Plan, ...] = ()  # the dearest first; empty: its own level answers all texts
    link: Link | None = None  # where unsure texts of requests to the model `hplm` go on
    stored: int = 0  # its version in the store, if that was published before and so has another number here

    @property
    def task_object(self) -> Task:
        """The tenant's task. Raises if a later version of hplm wrote the snapshot, with a task that is new."""
        if self.task not in TASKS:
            raise Broken(f"tenant {self.id!r} has the task {self.task!r}, which this server does not know: update hplm here")
        return TASKS[self.task]

    @property
    def head_record(self) -> Record:
        if self.head is None:
            raise InvalidInput(f"tenant {self.id!r} generates text and has no head: ask its backbone to generate")
        return self.head

    @cached_property
    def all_levels(self) -> tuple[Level, ...]:
        """Its levels on shallower stacks, and its own one on the full stack."""
        return (*self.levels, Level(FULL, self.head_record, self.adapter, self.calibration))

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """Its ladder; without one, the plan of its own level alone."""
        return self.ladder or (Plan((Step(len(self.levels)),)),)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """The cost of each rung of its ladder, the dearest first."""
        return tuple(plan.cost for plan in self.plans)

    def plan(self, rung: int) -> Plan:
        """Returns the plan of a rung, counted from 1, the dearest. Raises if there is none."""
        if not 0 < rung <= len(self.plans):
            has = f"rungs 1 to {len(self.plans)}" if len(self.plans) > 1 else "a single rung"
            raise InvalidInput(f"hplm_rung is {rung}, but the ladder of tenant {self.id!r} has {has}: name another or none")
        return self.plans[rung - 1]

    @property
    def stored_version(self) -> int:
        """Its version in the store."""
        return self.stored or self.version

    @property
    def has_quotas(self) -> bool:
        return any(getattr(self, quota) for quota in QUOTAS)

    @property
    def is_cascaded(self) -> bool:
        """Whether answers may be of several levels."""
        return bool(self.ladder or self.link)

    @cached_property
    def prunes(self) -> bool:
        """Whether a plan of its ladder leaves words out."""
        return any(step.alpha for plan in self.ladder for step in plan.steps)

    def records(self) -> list[Record]:
        own = [record for record in (self.head, self.adapter) if record is not None]
        return own + [record for level in self.levels for record in level.records()]

    def moved(self, moved: Mapping[Record, Record]) -> Tenant:
        """Returns the tenant with its records in other places."""
        head, adapter = (record and moved.get(record, record) for record in (self.head, self.adapter))
        return replace(self, head=head, adapter=adapter, levels=tuple(level.moved(moved) for level in self.levels))


class Snapshot:
    def __init__(self, generation: int, branches: Sequence[Branch], tenants: Sequence[Tenant], export: str) -> None:
        self.generation = generation
        self.export = export  # the name of the export that this snapshot and all later ones belong to
        self.branches = tuple(branches)
        self.tenants = tuple(tenants)
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
    def without_keys(self) -> tuple[Tenant, ...]:
        """The tenants that answer everybody."""
        return tuple(tenant for tenant in self.tenants if not tenant.keys)

    def with_digest(self, digest: str) -> list[Tenant]:
        """Returns the tenants that have a key with this digest, which may have expired.

        How long this takes tells nothing: nobody can choose the digest of a secret.
        """
        return self._by_digest.get(digest, [])

    @cached_property
    def _by_digest(self) -> dict[str, list[Tenant]]:
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

    def banks(self) -> list[str]:
        """Returns the file names of all banks with records of tenants."""
        return sorted({record.bank for tenant in self.tenants for record in tenant.records()})

    def save(self, path: Path) -> None:
        stored = {
            "format": FORMAT,
            "generation": self.generation,
            "export": self.export,
            "tables": [asdict(branch) for branch in self.branches],
            "tenants": [asdict(tenant) for tenant in self.tenants],
        }
        temporary = path.with_name(path.name + ".writing")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(stored, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    @classmethod
    def load(cls, path: Path) -> Snapshot:
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            raise InvalidInput(f"{path} is missing: {EXPORT_AGAIN}") from None
        return cls.read(stored, path)

    @classmethod
    def read(cls, text: bytes, place: object, way_out: str = EXPORT_AGAIN) -> Snapshot:
        """Returns the snapshot that a file contains. Error messages name its place and end with the way out."""
        try:
            stored: dict[str, Any] | list[Any] | None = json.loads(text)
        except ValueError as error:
            raise Broken(f"{place} is not JSON ({error}): {way_out}") from None
        if not isinstance(stored, dict):
            raise Broken(f"{place} holds no JSON object: {way_out}")
        if stored.get("format") not in READABLE:
            raise InvalidInput(
                f"{place} has format {stored.get('format')!r}, but this version of hplm reads {READABLE[0]} to {FORMAT}: "
                f"{way_out}"
            )
        try:
            tenants = [read_tenant(entry) for entry in stored["tenants"]]
            branches = [Branch(**entry) for entry in stored["tables"]]
            if not (all(map(_is_branch, branches)) and type(stored["generation"]) is int and type(stored["export"]) is str):
                raise TypeError("a table, its generation or its export has another type")
        except MISFITS as error:
            raise Broken(f"{place} does not describe tenants and tables ({error}): {way_out}") from None
        return cls(stored["generation"], branches, tenants, stored["export"])


def read_tenant(entry: dict[str, Any]) -> Tenant:
    fields = dict(entry)
    fields["labels"] = tuple(entry["labels"])
    fields["head"] = Record(**entry["head"]) if entry["head"] is not None else None
    fields["adapter"] = Record(**entry["adapter"]) if entry["adapter"] is not None else None
    calibration = entry.get("calibration")
    fields["calibration"] = Calibration.read(calibration) if calibration is not None else None
    fields["levels"] = tuple(Level.read(level) for level in entry.get("levels", ()))
    fields["ladder"] = tuple(Plan.read(plan) for plan in entry.get("ladder", ()))
    link = entry.get("link")
    fields["link"] = Link.read(link) if link is not None else None
    fields["keys"] = tuple(Key(**key) for key in entry.get("keys", ()))
    tenant = Tenant(**fields)
    if not _is_tenant(tenant):
        raise TypeError(f"tenant {tenant.id!r} has a field of another type")
    return tenant


def _is_branch(branch: Branch) -> bool:
    return type(branch.domain) is str and type(branch.version) is type(branch.base) is int


def _is_tenant(tenant: Tenant) -> bool:
    """Whether all fields have their types. They are checked here, once, because a wrong one fails far from its file."""
    words: list[object] = [tenant.id, tenant.domain, tenant.task, *tenant.labels]
    numbers: list[object] = [tenant.uid, tenant.version, tenant.stored, tenant.domain_version, tenant.in_flight, tenant.homes]
    numbers += (tenant.deadline_us, tenant.first_token_us, tenant.token_us)
    for record in tenant.records():
        words.append(record.bank)
        numbers += (record.index, record.uid, record.version)
    for key in tenant.keys:
        words += (key.id, key.digest)
        numbers.append(key.expires)
    rates = (tenant.rate, tenant.burst, tenant.texts_rate, tenant.tokens_rate)
    return (
        (tenant.calibration is None or tenant.calibration.suits(len(tenant.labels)))
        and all(level.calibration is not None and level.calibration.suits(len(tenant.labels)) for level in tenant.levels)
        and all(plan.suits(len(tenant.levels) + 1) for plan in tenant.ladder)
        and len(tenant.ladder) <= MOST_RUNGS
        and (tenant.link is None or (tenant.link.suits(len(tenant.levels) + 1) and tenant.calibration is not None))
        and all(type(word) is str for word in words)
        and all(type(number) is int for number in numbers)
        and tenant.homes >= 1
        and all(type(rate) in (int, float) for rate in rates)
    )
