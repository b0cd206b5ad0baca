"""The store of all that is built before it is exported. A store holds one backbone.

    store.json                      the format, and the original model by name or folder
    backbone.json  tokenizer.json  upper.safetensors
    lower/<domain>-<version>.safetensors        the lower stack that made a table, for further builds
    lower/<domain>-<version>.head.safetensors   the head that guesses masked words on top of it
    plot/<domain>/<version>/                    the table
    counts/<domain>/<version>/                  the count of each n-gram, for the next version; the corpus's files by name
    tenants/<id>/<version>/                     the record, as it is published  seen.npz  report.json  report.html  training.png

Every file is written under a temporary name, synced and renamed: a file with its own name is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from builder.console import say
from builder.store.branches import Branches, check_root, remove_folder
from builder.store.resumable import read_json, replaced, saved_plan, write_json
from builder.store.seen import SeenTexts
from builder.store.version import PICTURE, REPORT, SEEN, TenantVersion, Weights, described, read_version
from hplm.errors import Broken, InvalidInput, some
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack, UpperStack
from hplm.model.tokenizer import Tokenizer
from hplm.tenants.knowledge import TenantKnowledge
from hplm.tenants.snapshot import NAME

FORMAT = 3
SHOWN = 10  # names of tenants in an error
NO_TEXTS = SeenTexts()  # of an import, which has learned from no file of labelled texts
R = TypeVar("R")
G = TypeVar("G")


def check_name(kind: str, name: str) -> str:
    if not NAME.fullmatch(name):
        raise InvalidInput(f"{kind} name {name!r}: use 1-64 lower-case letters, digits, '.', '_' and '-', no leading sign")
    return name


def _renewed(stored: dict[str, Any]) -> str:
    """Says how to get a store that this version reads. `stored`: what `store.json` of another format says."""
    if isinstance(own := stored.get("format"), int) and own > FORMAT:
        return "a later version wrote it, so use that one"
    model = stored.get("model", "MODEL")
    return f"build it again with `hplm build root --model {model} --corpus FILE --store NEW`, then its domains and tenants"


def absolute_model(model: str) -> str:
    """Returns a model's name or, of a folder or file, its whole path: later commands may run in another folder."""
    return str(Path(model).absolute()) if Path(model).exists() else model


@contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """Writes a folder under a temporary name; it gets its own name once it is complete and synced."""
    temporary = folder.with_name(folder.name + ".writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary)
        raise
    for file in temporary.rglob("*"):
        if file.is_file():
            with open(file, "rb") as written:
                os.fsync(written.fileno())
    temporary.rename(folder)


class Store(Branches):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / "store.json"
        if not path.exists():
            check_root(folder)
            raise InvalidInput(f"{folder} is not a store: make one with `hplm build root --store {folder} ...`")
        stored = read_json(path)
        if (own := stored.get("format")) != FORMAT:
            raise InvalidInput(f"{path} has format {own!r}, this version of hplm reads {FORMAT}: {_renewed(stored)}")
        if "model" not in stored:
            raise Broken(f"{path} does not name the model that the store was made from: copy it again")
        self.model: str = stored["model"]  # the original, by name or folder
        self.config = BackboneConfig.load(folder / "backbone.json")

    @classmethod
    def create(
        cls, folder: Path, model: str, config: BackboneConfig, tokenizer_json: str, lower: LowerStack | None, upper: UpperStack
    ) -> Store:
        """Writes a store without tables. `store.json`, written last, makes it a store. `lower` None: it has yet to learn."""
        if (folder / "store.json").exists():
            raise InvalidInput(f"{folder} holds a store already: choose another --store, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(folder / "backbone.json") as temporary:
            config.save(temporary)
        with replaced(folder / "tokenizer.json") as temporary:
            temporary.write_text(tokenizer_json, "utf-8")
        Branches(folder).save_upper(upper)
        if lower is not None:
            Branches(folder).save_lower("root", 1, lower)
        write_json(folder / "store.json", {"format": FORMAT, "model": model})
        return cls(folder)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder / "tokenizer.json", self.config.positions, self.config.start_id)

    def tenant_work_folder(self, tenant_id: str) -> Path:
        return self.folder / "building" / "tenants" / tenant_id

    def interrupted_last(self, things: Sequence[tuple[str, G]]) -> list[tuple[str, G]]:
        """Returns what is given by tenants' names, last those whose build was interrupted: it may have taken all memory."""
        return sorted(things, key=lambda thing: self.tenant_work_folder(thing[0]).exists())

    def users(self, tenants: Iterable[TenantVersion] | None = None) -> dict[tuple[str, int], list[str]]:
        """Returns the users of each branch: newest tenant versions, child domains, and unfinished builds of either.

        `tenants`: default: all, each of which must be readable.
        """
        users: dict[tuple[str, int], list[str]] = {branch: [] for branch in self.domains()}
        for tenant in self.tenants() if tenants is None else tenants:
            users.setdefault((tenant.domain, tenant.domain_version), []).append(f"tenant {tenant.id}")
        for domain, version in self.domains():
            if (parent := self.meta(domain, version).parent_branch) is not None:
                users.setdefault(parent, []).append(f"domain {domain} version {version}")
        for branch, folder in self._begun():
            users.setdefault(branch, []).append(f"a build that was begun in {folder}")
        return users

    def _begun(self) -> Iterator[tuple[tuple[str, int], Path]]:
        """Yields, for each running or interrupted build, the branch that it needs and its folder."""
        for pattern in ("building/*-*", "building/tenants/*/*"):
            for folder in sorted(self.folder.glob(pattern)):
                plan = saved_plan(folder) or {}
                options = plan.get("options", {})
                if "domain" in plan:
                    yield (plan["domain"], plan["domain_version"]), folder
                elif "parent version" in options:
                    yield (options["parent"], options["parent version"]), folder

    def sweep(self) -> list[tuple[str, int]]:
        """Removes versions without users, except the newest and the one before it, which a rollback needs.

        Removes none while a tenant cannot be read: any of them may be the version that it stands on.
        """
        try:
            users = self.users()
        except Broken as error:
            say(f"old versions of tables are kept until all tenants can be read: {error}")
            return []
        of_domains = [list(own) for _, own in groupby(self.domains(), key=lambda branch: branch[0])]
        old = [branch for own in of_domains for branch in own[:-2] if not users[branch]]
        for branch in old:
            self.remove_branch(*branch)
        return old

    def remove_unfinished(self, domain: str) -> None:
        """Removes the remains of interrupted builds: a later build of the same name must not continue them."""
        finished = self.domains()
        for folder in self.folder.glob(f"building/{domain}-*"):
            version = folder.name.removeprefix(f"{domain}-")
            if version.isdecimal():
                if (domain, int(version)) not in finished:
                    self.remove_branch(domain, int(version))
                shutil.rmtree(folder)

    def tenant_ids(self) -> list[str]:
        found = self.folder.glob("tenants/*/*")
        return sorted({path.parent.name for path in found if path.name.isdecimal()})  # others are unfinished

    def tenants(self) -> list[TenantVersion]:
        """Returns the newest version of every tenant, ordered by id. Fails if one cannot be read."""
        return [tenant for name in self.tenant_ids() if (tenant := self.tenant(name)) is not None]

    def readable_tenants(self) -> list[TenantVersion]:
        """Returns the newest versions to list or report them: names those that cannot be read, and goes on."""
        return [tenant for tenant, _ in self._readable(lambda tenant: None)]

    def reports(self) -> dict[str, dict[str, Any]]:
        """Returns the reports of the newest versions that can be read, by id, and names the others."""
        return {tenant.id: report for tenant, report in self._readable(self.report)}

    def _readable(self, read: Callable[[TenantVersion], R]) -> Iterator[tuple[TenantVersion, R]]:
        for name in self.tenant_ids():
            try:
                if (tenant := self.tenant(name)) is not None:
                    yield tenant, read(tenant)
            except Broken as error:
                say(f"tenant {name} is left out: {error}")

    def tenant(self, tenant_id: str) -> TenantVersion | None:
        """Returns the tenant's newest version; None if it has none. Reads no other tenant: its file may be broken."""
        versions = self.tenant_versions(tenant_id)
        if not versions:
            return None
        try:
            return self.tenant_version(tenant_id, versions[-1])
        except Broken:
            if versions[-1] in self.tenant_versions(tenant_id):
                raise
            return self.tenant(tenant_id)  # another process has just deleted it

    def known_tenant(self, tenant_id: str) -> TenantVersion:
        """Returns the tenant's newest version, and refuses an id that is not in the store."""
        if (tenant := self.tenant(tenant_id)) is None:
            raise self.unknown(tenant_id)
        return tenant

    def unknown(self, tenant_id: str) -> InvalidInput:
        known = self.tenant_ids()
        near = get_close_matches(tenant_id, known, SHOWN)
        shown = [*near, *(name for name in known if name not in near)]
        return InvalidInput(f"tenant {tenant_id!r} is not in {self.folder}: known are {some(shown, SHOWN) or 'none yet'}")

    def tenant_versions(self, tenant_id: str) -> list[int]:
        """Returns the versions of a tenant, oldest first."""
        found = (self.folder / "tenants" / tenant_id).glob("*")
        return sorted(int(path.name) for path in found if path.name.isdecimal())

    def remove_tenant(self, tenant_id: str) -> None:
        """Removes all versions of a tenant. They leave `tenants` together, so an interrupted removal leaves none there."""
        remove_folder(self.folder / "tenants" / tenant_id, self.folder / "removed" / tenant_id)

    def tenant_version(self, tenant_id: str, version: int) -> TenantVersion:
        return described(self.tenant_folder(tenant_id, version))

    def tenant_folder(self, tenant_id: str, version: int) -> Path:
        return self.folder / "tenants" / tenant_id / str(version)

    def knowledge(self, tenant: TenantVersion) -> TenantKnowledge:
        """Returns all that is published of a version."""
        return read_version(self.tenant_folder(tenant.id, tenant.version))

    def tenant_weights(self, tenant: TenantVersion) -> Weights:
        """Returns the adapter by layer, None if the tenant has none, and the head, empty if it has none."""
        found = self.knowledge(tenant)
        adapter = [dict(layer) for layer in found.adapter[1]] if found.adapter is not None else None
        return adapter, dict(found.head[1]) if found.head is not None else {}

    def report(self, tenant: TenantVersion) -> dict:
        return read_json(self.tenant_folder(tenant.id, tenant.version) / REPORT)

    def seen(self, tenant: TenantVersion) -> SeenTexts:
        return SeenTexts.load(self.tenant_folder(tenant.id, tenant.version) / SEEN)

    def save_tenant(
        self, tenant: TenantVersion, adapter: list[dict[str, Tensor]] | None, head: dict[str, Tensor], report: dict,
        draw: Callable[[Path], object] | None = None, seen: SeenTexts = NO_TEXTS,
    ) -> None:  # fmt: skip
        """Saves adapter and head tensors, named and shaped as their layouts say. `draw` writes a picture to a path.

        `head`: empty if the tenant has none.
        """
        self.save_version(tenant, tenant.knowledge(self.config, adapter, head), report, draw, seen)

    def save_version(
        self, tenant: TenantVersion, knowledge: TenantKnowledge, report: dict, draw: Callable[[Path], object] | None = None,
        seen: SeenTexts = NO_TEXTS,
    ) -> None:  # fmt: skip
        with written_folder(self.tenant_folder(tenant.id, tenant.version)) as folder:
            packed = knowledge.packed()
            (folder / packed.name).write_bytes(packed.content)
            write_json(folder / REPORT, report)
            seen.save(folder / SEEN)
            if draw is not None:
                draw(folder / PICTURE)

    def save_next(
        self, tenant: TenantVersion, knowledge: TenantKnowledge, report: dict, by_students: frozenset[int] = frozenset()
    ) -> TenantVersion:
        """Saves a next version with the same weights, and the pages of the training that made them.

        `by_students`: hashes of the texts that only its students have learned.
        """
        seen = replace(self.seen(tenant), students=by_students)
        before = self.tenant_folder(tenant.id, tenant.version)
        tenant = replace(tenant, version=tenant.version + 1)

        def keep(picture: Path) -> None:
            for page in (*before.glob("*.png"), *before.glob("*.html")):
                shutil.copyfile(page, picture.with_name(page.name))

        self.save_version(tenant, knowledge, report, keep, seen)
        return tenant
