"""Snapshots: the served tenants, the tables that they are pinned to, and the records of their adapters and heads.

A snapshot never changes after it was renamed to its final name. The exported one is generation 0, `tenants.json` in the model
folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hplm.adapters.record import Record
from hplm.errors import MISFITS, Broken, InvalidInput, NoTenant
from hplm.levels.calibration import Calibration
from hplm.plot.branch import Branch
from hplm.tasks import TASKS, Task
from hplm.tenants.exits import Exits
from hplm.tenants.keys import Key

log = logging.getLogger(__name__)
FORMAT = 9
READABLE = (2, 3, 4, 5, 6, 7, 8, FORMAT)  # docs/formats.md says what the earlier ones lack
EXPORT_AGAIN = "export the repository again"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # of tenants, domains and backbones
LIVE = "state/"  # prefix of the names of banks in the live state
PROMISES = ("first_token_us", "token_us")  # limits that only a tenant that generates text may have
QUOTAS = ("rate", "burst", "texts_rate", "tokens_rate", "in_flight")
LIMITS = (*QUOTAS, "deadline_us", *PROMISES)  # of a tenant; each 0: none
NO_LONGER_SERVED = ("levels", "ladder", "link")  # fields of a tenant in formats up to 8


@dataclass(frozen=True, eq=False)
class TenantWeights:
    """The places of all weights of a tenant that the upper half needs. There is one for each tenant of a snapshot."""

    head: Record
    adapter: Record | None
    exits: Record | None


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
    exits: Exits | None = None  # where texts leave whose answers are sure; None: all pass all layers
    stored: int = 0  # its version in the store, if that was published before and so has another number here

    @cached_property
    def task_object(self) -> Task:
        """The tenant's task. Raises if a later version of hplm wrote the snapshot, with a task that is new."""
        if self.task not in TASKS:
            raise Broken(f"tenant {self.id!r} has the task {self.task!r}, which this server does not know: update hplm here")
        return TASKS[self.task]

    @cached_property
    def weights(self) -> TenantWeights:
        if self.head is None:
            raise InvalidInput(f"tenant {self.id!r} generates text and has no head: ask its backbone to generate")
        return TenantWeights(self.head, self.adapter, self.exits.record if self.exits is not None else None)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """The expected work of a token by each of its plans, the dearest first: 1.0 is a pass through all layers."""
        return tuple(plan.cost for plan in self.exits.plans) if self.exits is not None else (1.0,)

    @property
    def has_quotas(self) -> bool:
        return any(getattr(self, quota) for quota in QUOTAS)

    def records(self) -> list[Record]:
        exits = self.exits.record if self.exits is not None else None
        return [record for record in (self.head, self.adapter, exits) if record is not None]

    def moved(self, moved: Mapping[Record, Record]) -> Tenant:
        """Returns the tenant with its records in other places."""
        head, adapter = (record and moved.get(record, record) for record in (self.head, self.adapter))
        exits = self.exits
        if exits is not None and exits.record is not None:
            exits = replace(exits, record=moved.get(exits.record, exits.record))
        return replace(self, head=head, adapter=adapter, exits=exits)


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
    if any(map(entry.get, NO_LONGER_SERVED)):
        _warn_of_levels(entry["id"], entry["uid"])
    fields = {name: value for name, value in entry.items() if name not in NO_LONGER_SERVED}
    fields["labels"] = tuple(entry["labels"])
    fields["head"] = Record(**entry["head"]) if entry["head"] is not None else None
    fields["adapter"] = Record(**entry["adapter"]) if entry["adapter"] is not None else None
    calibration = entry.get("calibration")
    fields["calibration"] = Calibration.read(calibration) if calibration is not None else None
    fields["exits"] = Exits.read(entry["exits"]) if entry.get("exits") is not None else None
    fields["keys"] = tuple(Key(**key) for key in entry.get("keys", ()))
    tenant = Tenant(**fields)
    if not _is_tenant(tenant):
        raise TypeError(f"tenant {tenant.id!r} has a field of another type")
    return tenant


@cache
def _warn_of_levels(tenant_id: str, uid: int) -> None:
    """Warns once for each tenant: its snapshots are read again and again."""
    log.warning(
        "tenant %s has levels or a link of an earlier version of hplm, which are no longer served: its full stack answers",
        tenant_id,
    )


def _is_branch(branch: Branch) -> bool:
    return type(branch.domain) is str and type(branch.version) is type(branch.base) is int


def _are_exits(tenant: Tenant, exits: Exits) -> bool:
    return exits.record is not None and exits.suits(len(tenant.labels), tenant.task_object.is_number)


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
        and (tenant.exits is None or _are_exits(tenant, tenant.exits))
        and all(type(word) is str for word in words)
        and all(type(number) is int for number in numbers)
        and tenant.homes >= 1
        and all(type(rate) in (int, float) for rate in rates)
    )
