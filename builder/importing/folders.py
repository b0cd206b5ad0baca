"""Imports many folders, adapters and checkpoints: what cannot be imported is named, the others go on."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch

from builder.console import no_progress_bars
from builder.importing.adapter_import import ImportOptions, checked, import_tenant, read_adapter
from builder.importing.checkpoint import Family, is_checkpoint, size
from builder.importing.foreign import ADAPTER_CONFIG, CONFIG, WRITTEN
from builder.importing.matching import Unlike, import_checkpoint, lora_of
from builder.importing.options import Matching
from builder.importing.texts import UnlabelledTexts
from builder.page import imports_page
from builder.store.branches import Branches
from builder.store.store import Store, TenantVersion, check_name
from builder.worker_processes import outcomes
from hplm.errors import HplmError, InvalidInput
from hplm.model.checkpoint import load_checkpoint
from hplm.tenants.snapshot import NAME

PAGE = "imports.html"
OWN_TEXTS = "texts.jsonl"  # in a checkpoint's folder
NOT_IN_NAMES = re.compile(r"[^a-z0-9._-]+")
Folders = Sequence[tuple[str, Path]]  # with the names of their tenants


@dataclass(frozen=True)
class Imported:
    """Says what became of a folder, or would become of it."""

    id: str
    folder: Path
    tenant: TenantVersion | None = None  # None: it was refused, or only planned
    report: dict[str, Any] = field(default_factory=dict[str, Any])  # of a planned adapter: empty
    refused: str = ""

    @property
    def agreement(self) -> float | None:
        return self.report.get("after", {}).get("agreement")


class Unbuilt(Store):
    """The store that an import builds first: it has a root, and no tenants."""

    def __init__(self, folder: Path, model: str) -> None:
        Branches.__init__(self, folder)
        self.model, self.config = model, load_checkpoint(model).config

    def latest(self, domain: str) -> int:
        return 1 if domain == "root" else super().latest(domain)


@dataclass(frozen=True)
class Importer:
    """Imports folders into one store. What all checkpoints share is read once."""

    store: Store
    options: ImportOptions
    matching: Matching
    given: Path | None  # texts for checkpoints that have no file of texts in their folder; None: the corpus of the domain
    device: torch.device

    def __reduce__(self) -> tuple[Any, ...]:
        return _sent, (self.store.folder, self.options, self.matching, self.given, self.device)

    @cached_property
    def _family(self) -> Family:
        return Family(self.store.model, self.store.config)

    @cached_property
    def _texts(self) -> UnlabelledTexts | None:
        """The texts for checkpoints without texts of their own; None if the domain's corpus would be and is not here."""
        if self.given is not None:
            return UnlabelledTexts([self.given])
        files = self.store.corpus(self.options.domain, self.store.latest(self.options.domain))
        is_here = bool(files) and all(file.exists() for file in files)
        return UnlabelledTexts(files, are_documents=True) if is_here else None

    def one(self, tenant_id: str, folder: Path, is_named: bool = True) -> tuple[TenantVersion, dict[str, Any]]:
        """Imports an adapter or a checkpoint. `is_named`: the user has named the tenant, so it may be any."""
        given = self.store, tenant_id, folder
        if (texts := self._texts_for(tenant_id, folder, is_named)) is None:
            return import_tenant(*given, self.options, self.device)
        return import_checkpoint(*given, self._family, texts, self.options, self.matching, self.device)

    def _planned(self, tenant_id: str, folder: Path, is_named: bool) -> tuple[None, dict[str, Any]]:
        """Refuses what `one` would before it learns. Returns what a plan says of a checkpoint; of an adapter, nothing."""
        store, options, told = self.store, self.options, dict[str, Any]()
        if (texts := self._texts_for(tenant_id, folder, is_named)) is None:
            tenant, *_ = read_adapter(store, tenant_id, folder, options)
            task, labels = tenant.task, tenant.labels
        else:
            found = self._family.read(folder, options.labels, options.task)
            task, labels = found.head.task, found.labels
            after = lora_of(self.matching, store.config).weight_bytes + found.head_bytes
            sizes = {"before": size(folder), "after": after}
            told = {"task": task, "labels": len(labels), "distance": found.distance, "bytes": sizes}
        checked(store, tenant_id, task, labels, options.test)
        _ = texts and texts.examples
        return None, told

    def _texts_for(self, tenant_id: str, folder: Path, is_named: bool) -> UnlabelledTexts | None:
        """Checks a folder, and returns the texts from which a checkpoint's tenant learns; None for an adapter."""
        store, options = self.store, self.options
        if is_named:
            check_name("tenant", tenant_id)
        else:
            _check(tenant_id, folder)
            tenant = store.tenant(tenant_id)
            came = store.report(tenant).get("imported", {}).get("from") if tenant is not None else folder
            if came is None or Path(came).resolve() != folder.resolve():
                raise InvalidInput(
                    f"tenant {tenant_id!r} is there, and does not come from {folder} but from {came or 'a training'}: import "
                    "it alone with --id, which may also name this tenant"
                )
        if not is_checkpoint(folder):
            return None
        store.latest(options.domain)  # refuses an unknown one
        own = folder / OWN_TEXTS
        if (texts := UnlabelledTexts([own]) if own.exists() else self._texts) is None:
            raise InvalidInput(
                f"{folder} is a whole checkpoint, which a tenant learns to match from texts, and the corpus of domain "
                f"{options.domain!r} is not here: give --texts FILE"
            )
        return texts

    def all(self, folders: Folders, pool: Executor) -> Iterator[Imported]:
        """Imports folders on the workers of a pool; yields what became of each."""
        self._check_shared(folders)
        for one, found in outcomes(pool, self.tried, self.store.interrupted_last(folders)):
            yield Imported(*one, refused=found) if isinstance(found, str) else found

    def plan(self, folders: Folders, is_named: bool = False) -> Iterator[Imported]:
        """Reads and checks each folder, and yields what would become of it."""
        self._check_shared(folders)
        yield from (_tried(*one, partial(self._planned, is_named=is_named)) for one in folders)

    def _check_shared(self, folders: Folders) -> None:
        """Refuses what would be wrong for all checkpoints."""
        if any(is_checkpoint(folder) for _, folder in folders):
            _ = self._family, lora_of(self.matching, self.store.config), self.given and self._texts and self._texts.examples

    @no_progress_bars()
    def tried(self, tenant_id: str, folder: Path) -> Imported:
        return _tried(tenant_id, folder, partial(self.one, is_named=False))


@cache
def _sent(folder: Path, *given: Any) -> Importer:
    """Returns the importer of a process that it was sent to, which reads once what all checkpoints share."""
    return Importer(Store(folder), *given)


def _tried(tenant_id: str, folder: Path, work: Callable[[str, Path], tuple[TenantVersion | None, dict[str, Any]]]) -> Imported:
    """Returns what became of a folder. Only what concerns all folders is raised."""
    try:
        return Imported(tenant_id, folder, *work(tenant_id, folder))
    except HplmError as error:
        return Imported(tenant_id, folder, None, error.report if isinstance(error, Unlike) else {}, str(error))
    except OSError as error:  # a file that nobody may read
        if error.errno == errno.ENOSPC:
            raise
        return Imported(tenant_id, folder, None, {}, f"{error.filename or folder}: {error.strerror or error}")


def named(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """Returns each folder with the tenant's name that its own name gives. A folder without a model stands for those in it.

    A folder that gives no name, or the same as another, stands for itself. It is refused later, and the others go on.
    """
    models, found = list[Path](), dict[str, list[Path]]()
    for folder in folders:
        if not folder.is_dir():
            raise InvalidInput(f"{folder} is no folder: give folders that a library saved, or one with such folders in it")
        inside = sorted(path for path in folder.iterdir() if not (path.name.startswith(".") or os.path.isfile(path)))
        models += [folder] if (folder / CONFIG).exists() or (folder / ADAPTER_CONFIG).exists() or not inside else inside
    for folder in models:
        own = folder.absolute().name
        found.setdefault(NOT_IN_NAMES.sub("-", own.lower()).strip("._-") or str(folder), []).append(folder)
    return [(name if len(same) == 1 else str(folder), folder) for name, same in found.items() for folder in same]


def _check(tenant_id: str, folder: Path) -> None:
    if not NAME.fullmatch(tenant_id):
        raise InvalidInput(
            f"the name of {folder} cannot be a tenant's, or another folder gives the same: import it alone and give --id "
            "NAME, 1-64 lower-case letters, digits, '.', '_' and '-', no leading sign"
        )
    if not any((folder / name).exists() for name in (CONFIG, ADAPTER_CONFIG)):
        raise InvalidInput(f"{folder} has no {CONFIG} and no {ADAPTER_CONFIG}: {WRITTEN}")


def called(tenant_id: str, folder: Path) -> str:
    """Returns a tenant's name, with the folder that it comes from if that has another one."""
    return tenant_id if tenant_id in (folder.absolute().name, str(folder)) else f"{tenant_id} (from {folder})"


def write_page(store: Store, found: Sequence[Imported], name: str = PAGE) -> Path:
    """Writes the page of all imported checkpoints, those that agree least first, and returns its path.

    `found`: what was imported now, of which the page also has what was refused.
    """
    stored = {name: report for name, report in store.reports().items() if "after" in report}
    others = {one.id: one.report for one in found if one.tenant is None and one.report}
    matched = sorted((stored | others).items(), key=lambda one: one[1]["after"]["agreement"])
    titles = {name: called(name, Path(report["imported"]["from"])) for name, report in matched}
    rows = {titles[name] + " (not stored)" * (report != stored.get(name)): report for name, report in matched}
    imports_page(page := store.folder / name, rows, {one.folder: one.refused for one in found if one.tenant is None})
    return page
