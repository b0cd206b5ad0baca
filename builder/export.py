"""From a store to Triton model folders: the ensemble, its two models and the knowledge they share."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from builder.model_configs import ServingOptions, write_configs
from builder.store import Store, TenantFile, written_folder
from hplm.adapters.bank import Layout, Record, write_bank
from hplm.engine.backbone import Backbone
from hplm.errors import InvalidInput
from hplm.plot.forest import Branch
from hplm.tenants.snapshot import Snapshot, Tenant

HEAD_SIZES = (16, 64, 256, 1024, 4096)  # few sizes, so that heads of different tenants batch


@dataclass(frozen=True)
class Exported:
    backbone: str
    tenants: int
    tables: int
    folder: Path


def export(store: Store, repository: Path, options: ServingOptions, replace: bool = False) -> Exported:
    """Writes `<backbone>`, `<backbone>-lookup` and `<backbone>-upper`.

    The version folder is written whole beside the old one and takes its name; a server that has the old one mapped keeps it
    until it is restarted or told to load. Tenants that only the repository knows are not dropped unless `replace` says so.
    """
    tenants = store.tenants()
    if not tenants:
        raise InvalidInput(f"{store.folder} has no tenants to export: build one with `hplm build tenant`")
    name = store.config.name
    version_folder = repository / name / "1"
    if version_folder.exists() and not replace:
        _refuse_loss(version_folder, tenants)
    with _replaced_folder(version_folder) as folder:
        store.config.save(folder / Backbone.CONFIG)
        for file in (Backbone.TOKENIZER, Backbone.UPPER):
            _copy(store.folder / file, folder / file)
        branches = store.branches()
        for branch in branches:
            for file in sorted((store.folder / "plot" / branch.folder).iterdir()):
                _copy(file, folder / Backbone.TABLES / branch.folder / file.name)
        exported = _write_banks(store, tenants, folder / Backbone.BANKS)
        Snapshot(0, branches, exported, _digest(branches, exported)).save(folder / Backbone.TENANTS)
    write_configs(repository, store.config, options)
    return Exported(name, len(tenants), len(branches), repository / name)


def _refuse_loss(version_folder: Path, tenants: list[TenantFile]) -> None:
    known = {tenant.id for tenant in Snapshot.load(version_folder / Backbone.TENANTS).tenants}
    lost = sorted(known - {tenant.id for tenant in tenants})
    if lost:
        raise InvalidInput(
            f"{version_folder} serves {len(lost)} tenants that this store does not have ({', '.join(lost[:5])}"
            f"{', ...' if len(lost) > 5 else ''}): export from the store they were built in, or say --replace to drop them"
        )


@contextmanager
def _replaced_folder(folder: Path) -> Iterator[Path]:
    """Like `written_folder`, but what is written takes the place of what is there."""
    fresh = folder.with_name(folder.name + ".new")
    old = folder.with_name(folder.name + ".old")
    for left_behind in (fresh, old):
        shutil.rmtree(left_behind, ignore_errors=True)
    with written_folder(fresh) as writing:
        yield writing
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_banks(store: Store, tenants: list[TenantFile], folder: Path) -> list[Tenant]:
    """Records of one layout go to one bank, in order of tenant id; uids number the tenants from 1."""
    folder.mkdir()
    records: dict[Layout, list[tuple[int, int, Tensor]]] = defaultdict(list)
    config = store.config

    def add(layout: Layout, uid: int, version: int, layers: list[dict[str, Tensor]]) -> Record:
        records[layout].append((uid, version, layout.pack(layers)))
        return Record(layout.file_name, len(records[layout]) - 1, uid, version)

    exported = []
    for uid, tenant in enumerate(tenants, start=1):
        adapter, head = store.tenant_weights(tenant)
        adapter_record = None
        if adapter is not None:
            layout = Layout("bottleneck", tenant.rank, config.hidden, config.upper_layers)
            adapter_record = add(layout, uid, tenant.version, adapter)
        size = _head_size(tenant)
        layout = Layout("head", size, config.hidden, 1)
        head_record = add(layout, uid, tenant.version, [_grown(head, size)])
        exported.append(
            Tenant(
                id=tenant.id,
                uid=uid,
                version=tenant.version,
                domain=tenant.domain,
                domain_version=tenant.domain_version,
                task=tenant.task,
                labels=tuple(tenant.labels),
                head=head_record,
                adapter=adapter_record,
            )
        )
    for layout, entries in records.items():
        write_bank(folder / layout.file_name, layout, entries)
    return exported


def _head_size(tenant: TenantFile) -> int:
    for size in HEAD_SIZES:
        if len(tenant.labels) <= size:
            return size
    raise InvalidInput(f"tenant {tenant.id!r} has {len(tenant.labels)} labels; heads go up to {HEAD_SIZES[-1]}")


def _grown(head: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Rows beyond the tenant's labels are zero and never read."""
    weight = torch.zeros(size, head["weight"].shape[1])
    bias = torch.zeros(size)
    weight[: len(head["weight"])] = head["weight"]
    bias[: len(head["bias"])] = head["bias"]
    return {"weight": weight, "bias": bias}


def _digest(branches: list[Branch], tenants: list[Tenant]) -> str:
    """Names an export by its content, so that the same export again is the same to a live state."""
    return hashlib.sha256(repr((branches, tenants)).encode()).hexdigest()[:16]


def _copy(source: Path, target: Path) -> None:
    """A hard link where the file system allows: nothing that is exported is ever written in place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
