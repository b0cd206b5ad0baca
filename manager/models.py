"""The models of owners: the tenants whose name begins with an owner's, in the registry and in the stores.

A tenant is managed if it has the manager's own key. Others of such a name are not touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hplm.errors import HplmError, InvalidInput
from hplm.location import Location
from hplm.tenants import keys
from hplm.tenants.change import Change
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import QUOTAS, Tenant
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import shown
from manager.children import Manner, finish
from manager.records import Job, Records
from manager.rights import Rights, digest_of

CANDIDATE = re.compile(r"(.+)\.v(\d+)")  # the tenant under which a version waits
NOT_FOUND = "no such model, or not yours: GET /v1/models lists them"


@dataclass(frozen=True)
class Base:
    """A backbone on which tenants learn: its store, and the registry from which they are served."""

    name: str
    store: Path
    repository: Path
    state: Location
    manager: Manager

    @classmethod
    def open(cls, store: Path, repository: Path, state: Location) -> Base:
        try:
            name = str(json.loads((store / "backbone.json").read_text("utf-8"))["name"])
        except (OSError, ValueError, KeyError, TypeError):
            raise InvalidInput(f"{store} is not a store: make one with `hplm build root`") from None
        manager = Manager.open(repository, state, name)
        manager.registry.pointer()  # raises if there is no registry
        place = state.absolute() if isinstance(state, Path) else state
        return cls(name, store.absolute(), repository.absolute(), place, manager)

    @property
    def places(self) -> list[object]:
        """The options of a command that serves something of the store."""
        return ["--store", self.store, *self.served]

    @property
    def served(self) -> list[object]:
        """The options that name the served backbone."""
        return ["--repository", self.repository, "--state", self.state, "--backbone", self.name]

    def versions(self, tenant: str) -> list[int]:
        """Returns a tenant's versions in the store, oldest first."""
        return sorted(int(path.name) for path in (self.store / "tenants" / tenant).glob("*") if path.name.isdecimal())

    def created(self, *place: object) -> int:
        """Returns when what lies at a place of the store was made; 0: it is not there."""
        try:
            return int(self.store.joinpath(*map(str, place)).stat().st_mtime)
        except OSError:
            return 0

    def domain_versions(self, domain: str) -> list[int]:
        """Returns a domain's versions in the store, oldest first."""
        found = (path.parent.name for path in (self.store / "plot" / domain).glob("*/meta.json"))
        return sorted(int(name) for name in found if name.isdecimal())

    def report(self, tenant: str, version: int) -> dict[str, Any]:
        """Returns the report of a version's training; empty if it has none."""
        try:
            return json.loads((self.store / "tenants" / tenant / str(version) / "report.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}

    def domains(self) -> dict[str, bool]:
        """Returns the domains of the store, and whether the newest version of each is served."""
        served = {branch.id for branch in self.manager.current().branches}
        names = sorted(folder.name for folder in self.store.glob("plot/*"))
        return {name: (name, versions[-1]) in served for name in names if (versions := self.domain_versions(name))}


@dataclass(frozen=True)
class Served:
    """A managed tenant, which is served."""

    base: Base
    tenant: Tenant

    @property
    def candidate_of(self) -> str | None:
        found = CANDIDATE.fullmatch(self.tenant.id)
        return found[1] if found else None

    @property
    def stored(self) -> int:
        """The version in the store that is served."""
        return self.tenant.stored or self.tenant.version

    def report(self, version: int) -> dict[str, Any]:
        """Returns the report of a version of this model; empty if it has none."""
        return self.base.report(self.candidate_of or self.tenant.id, version)


class Models:
    def __init__(self, records: Records, rights: Rights, bases: dict[str, Base], folder: Path, manner: Manner) -> None:
        self._records, self._rights, self._folder = records, rights, folder
        self._manner = replace(manner, is_awaited=True)
        self.bases = bases
        self._own = digest_of(rights.secret)

    def served(self, owner: str) -> list[Served]:
        return [one for base in self.bases.values() for one in self._managed(base) if owner_of(one.tenant.id) == owner]

    def find(self, owner: str, id: str) -> Served:
        for one in self.served(owner):
            if one.tenant.id == id:
                return one
        raise Refused(404, NOT_FOUND, "model_not_found", "model")

    def check_free(self, owner: str, id: str, base: Base, param: str) -> None:
        """Raises if a tenant has this name that is not the owner's, or on another backbone."""
        for other in self.bases.values():
            is_served = any(one.id == id for one in other.manager.current().tenants)
            if is_served and (other is not base or all(mine.tenant.id != id for mine in self.served(owner))):
                raise Refused(409, f"there is another model {id!r}: choose another {param!r}", param=param)

    def listed(self, owner: str) -> list[dict[str, Any]]:
        """Returns all models that an owner can name: bases to learn on, then its own."""
        bases = [
            _model(base.name if domain == "root" else f"{base.name}/{domain}", "hplm", base.created("plot", domain))
            for base in self.bases.values()
            for domain, is_served in base.domains().items()
            if is_served
        ]
        return [*sorted(bases, key=_id), *sorted(map(self._told, self.served(owner)), key=_id)]

    def described(self, owner: str, id: str) -> dict[str, Any]:
        """Returns one of these models; of a tenant also its versions and their scores."""
        for model in self.listed(owner):
            if model["id"] == id and model["owned_by"] != owner:
                return model
        found = self.find(owner, id)
        told = self._told(found)
        name, waiting = found.candidate_of or id, {one.tenant.id for one in self.served(owner)}
        told["hplm"]["versions"] = [
            {
                "version": version, **score_of(found.report(version)),
                "live": version == found.stored and not found.candidate_of,
                "waits_as": waits if (waits := f"{name}.v{version}") in waiting else None,
            }
            for version in found.base.versions(name)
        ]  # fmt: skip
        return told

    def promote(self, owner: str, id: str, version: object, who: str) -> dict[str, Any]:
        """Serves a version of the store under the tenant's own name, and takes away the candidate that it was."""
        found = self.find(owner, id)
        known = [] if found.candidate_of else found.base.versions(id)
        if type(version) is not int or version not in known:
            raise wrong(f"'version' is {shown(version)}, and {id!r} has {known or 'none'}: give one of them", "version")
        self._records.note(who, owner, "model promote", model=id, version=version)
        with TemporaryDirectory(dir=self._folder) as folder:
            words = self.publishing(found.base, id, version, id, Path(folder))
            finish(words, Path(folder), replace(self._manner, who=f"manager {who}"))
        self.published(found.base, id, version, id)
        return self.described(owner, id)

    def add_record(self, owner: str, id: str, base: Base, record: Path, name: str, who: str) -> dict[str, Any]:
        """Serves a record file as a model of an owner. `name`: the owner's of the file."""
        self._records.note(who, owner, "model record", model=id)
        with TemporaryDirectory(dir=self._folder) as folder:
            words = ["tenant", "publish", id, "--record", record, "--keys", self._keys_file(owner, Path(folder)), *base.served]
            try:
                finish(words, Path(folder), replace(self._manner, who=f"manager {who}"))
            except HplmError as error:
                raise wrong(str(error).replace(str(record), name), "file") from None
        self.mend()
        return self.described(owner, id)

    def publishing(self, base: Base, tenant: str, version: int, served_as: str, folder: Path) -> list[object]:
        """Returns the command that serves a version with its owner's keys, which changes nothing the second time."""
        file = self._keys_file(owner_of(tenant), folder)
        return ["tenant", "publish", tenant, "--version", version, "--as", served_as, "--keys", file, *base.places]

    def _keys_file(self, owner: str, folder: Path) -> Path:
        """Writes the digests that an owner's tenants have."""
        lines = [f"{key.digest} {key.expires or ''}" for key in self._wanted(owner)]
        (file := folder / "keys").write_text("".join(f"{line.strip()}\n" for line in lines), "utf-8")
        return file

    def published(self, base: Base, tenant: str, version: int, served_as: str) -> None:
        """Does what follows a publication: its candidate goes, and keys are as they should be."""
        if served_as == tenant:
            self._remove(base, [f"{tenant}.v{version}"])
        self.mend()

    def roll_back(self, owner: str, id: str, who: str) -> dict[str, Any]:
        found = self.find(owner, id)
        self._records.note(who, owner, "model rollback", model=id)
        found.base.manager.roll_back(id)
        self.mend()
        found.base.manager.settle()
        return self.described(owner, id)

    def limit(self, owner: str, id: str, given: dict[str, Any], who: str) -> dict[str, Any]:
        """Sets quotas of a model, and the time that its answers may take."""
        found = self.find(owner, id)
        if unknown := given.keys() - {*QUOTAS, "deadline_us"} or not given:
            named = ", ".join(map(shown, unknown)) if isinstance(unknown, set) else "nothing"
            raise InvalidInput(f"the limits are {named}: give some of {', '.join(QUOTAS)}, deadline_us; 0 removes one")
        self._records.note(who, owner, "model limits", model=id, **given)
        found.base.manager.limit(id, **given)
        found.base.manager.settle()
        return self.described(owner, id)

    def delete(self, owner: str, id: str, who: str, cancel: Callable[[Job], object]) -> None:
        """Deletes a model: of a tenant also its candidates, versions and reports. The same call finishes a broken one.

        `cancel`: ends a job.
        """
        base = self._base_of(owner, id)
        self._records.note(who, owner, "model delete", model=id)
        candidates = [one.tenant.id for one in self._managed(base) if one.candidate_of == id]
        for job in self._records.jobs_of(id):
            if not job.ended:
                cancel(job)
        self._remove(base, [id, *candidates])
        if base.versions(id):
            with TemporaryDirectory(dir=self._folder) as folder:
                finish(["tenant", "delete", id, "--store", base.store], Path(folder), self._manner)

    def mend(self) -> None:
        """Lets every managed tenant have the valid keys of its owner, and none that was revoked."""
        for base in self.bases.values():
            if self._lacking(base.manager.current().tenants):
                base.manager.registry.change("manager keys", self._edit_keys)
                base.manager.settle()

    def _edit_keys(self, change: Change) -> None:
        lacking = self._lacking(change.tenants.values())
        for tenant_id, own in lacking.items():
            change.tenants[tenant_id] = replace(change.tenants[tenant_id], keys=own)
        change.is_empty = not lacking
        change.details = {"tenants": [*lacking]}

    def _lacking(self, tenants: Iterable[Tenant]) -> dict[str, tuple[keys.Key, ...]]:
        """Returns the keys of the managed tenants that have others now."""
        wanted = {owner.id: self._wanted(owner.id) for owner in self._records.owners()}
        revoked = {key.digest for name in wanted for key in self._records.keys(name) if key.revoked}
        found = dict[str, tuple[keys.Key, ...]]()
        for tenant in tenants:
            if self._is_managed(tenant) and (own := wanted.get(owner_of(tenant.id))) is not None:
                kept = [key for key in tenant.keys if key.digest not in revoked]
                if (new := keys.further(kept, own)) or len(kept) < len(tenant.keys):
                    found[tenant.id] = (*kept, *new)
        return found

    def _wanted(self, owner: str) -> list[keys.Key]:
        """Returns the keys of an owner's tenants: its valid ones, and the manager's own."""
        own = [key for key in self._records.keys(owner) if self._rights.is_valid(key)]
        return [keys.Key("manager", self._own, 0), *(keys.Key(key.id, key.digest, key.expires) for key in own)]

    def _is_managed(self, tenant: Tenant) -> bool:
        return any(key.digest == self._own for key in tenant.keys)

    def _managed(self, base: Base) -> Iterator[Served]:
        return (Served(base, tenant) for tenant in base.manager.current().tenants if self._is_managed(tenant))

    def _base_of(self, owner: str, id: str) -> Base:
        """Returns where a model is served, or where a deletion that was broken off has left its versions."""
        left = [job for job in self._records.jobs_of(id) if job.owner == owner and job.backbone in self.bases]
        if left and self.bases[left[0].backbone].versions(id):
            return self.bases[left[0].backbone]
        return self.find(owner, id).base

    def _remove(self, base: Base, names: list[str]) -> None:
        """Takes managed tenants out of the registry, where they are in it."""

        def edit(change: Change) -> None:
            known = [name for name in names if name in change.tenants and self._is_managed(change.tenants[name])]
            for name in known:
                change.remove_tenant(name)
            change.is_empty = not known
            change.details = {"tenants": known}

        if any(tenant.id in names for tenant in base.manager.current().tenants):
            base.manager.registry.change("manager delete", edit)
            base.manager.settle()

    def _told(self, served: Served) -> dict[str, Any]:
        tenant = served.tenant
        quotas = {name: value for name in (*QUOTAS, "deadline_us") if (value := getattr(tenant, name))}
        own = {
            "backbone": served.base.name, "domain": tenant.domain, "task": tenant.task, "version": served.stored,
            "candidate_of": served.candidate_of, "limits": quotas, "dev": score_of(served.report(served.stored)) or None,
        }  # fmt: skip
        created = served.base.created("tenants", served.candidate_of or tenant.id, served.stored)
        return {**_model(tenant.id, owner_of(tenant.id), created), "labels": list(tenant.labels), "hplm": own}


def owner_of(tenant: str) -> str:
    return tenant.partition(".")[0]


def score_of(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the deciding score of a version on its dev texts; empty if its report has none."""
    dev = report.get("dev", {})
    metric = dev.get("metric")
    return {"metric": metric, "score": dev[metric], "texts": dev.get("texts")} if metric in dev else {}


def _id(model: dict[str, Any]) -> str:
    return model["id"]


def _model(name: str, owner: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}
