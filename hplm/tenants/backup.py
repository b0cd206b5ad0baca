"""Backs a registry up into a folder, and restores it. Servers and managers go on meanwhile: objects never change."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hplm.disk import bytes_in
from hplm.errors import Broken, InvalidInput, some
from hplm.location import Location
from hplm.registry.folder import Folder, missing_folders, sync
from hplm.registry.pointer import Pointer, is_begun
from hplm.registry.store import CURRENT, RECORDS, SNAPSHOTS, TABLES, Absent, not_begun, objects_of
from hplm.tenants.change import Change
from hplm.tenants.manager import Manager
from hplm.tenants.registry_writer import Registry, needed_by, registries_of
from hplm.tenants.snapshot import Snapshot, Tenant

FORMAT = 2
MANIFEST = "backup.json"
TRIES = 5
LOST = 1000  # changes that a lost registry may have had since its backup, and whose generations servers have taken


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    export: str
    generation: int


def back_up(manager: Manager, target: Path) -> dict[str, Any]:
    """Copies all that the newest generation needs. Returns what it has copied."""
    if target.exists():
        raise InvalidInput(f"{target} exists already: name a new folder")
    registry, writing, left = manager.registry, target.with_name(f"{target.name}.writing"), TRIES
    registry.pointer()  # it must be begun
    named = {target.parent, *(folder.parent for folder in missing_folders(target.parent))}
    try:
        while True:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
            try:
                manifest = _copy(registry, Folder(writing))
                break
            except Absent:  # after a change and a minute, the newest generation needs other objects
                left -= 1
                if not left:
                    raise
        (writing / MANIFEST).write_bytes(msgspec.json.encode(manifest) + b"\n")
        for path in (*writing.rglob("*"), writing):
            sync(path)
        writing.rename(target)
    finally:
        shutil.rmtree(writing, ignore_errors=True)  # it failed
    for folder in named:
        sync(folder)
    return msgspec.structs.asdict(manifest)


def brought(repository: Path, location: Location, folder: Path) -> Path:
    """Copies what the newest generations of a bucket need into a folder, which then is as a state. Returns it."""
    begun = [name for name, registry in registries_of(repository, location).items() if is_begun(registry.store)]
    if not begun:
        raise not_begun(location)
    for name in begun:
        back_up(Manager.open(repository, location, name), folder / name)
    return folder


def _copy(registry: Registry, copy: Folder) -> _Manifest:
    pointer = registry.pointer()
    snapshot, store = registry.at(pointer), registry.store
    objects = objects_of(store, needed_by(snapshot) - needed_by(registry.exported))
    if pointer.generation:
        objects.append(f"{SNAPSHOTS}/{pointer.snapshot}")
    sizes = {found.name: found.size for folder in (RECORDS, SNAPSHOTS, TABLES) for found in store.names(folder)}
    copy.expect_room(sum(sizes.get(name, 0) for name in objects), f"the backup of {store}")
    for name in objects:
        to = copy.path / name
        to.parent.mkdir(parents=True, exist_ok=True)
        store.fetch(name, to)
    kept = {pointer.generation: pointer.snapshot} if pointer.generation else {}
    copy.swap(Pointer(pointer.generation, pointer.lineage, kept, pointer.lease_s).written(), None)
    return _Manifest(FORMAT, snapshot.export, snapshot.generation)


def restore(source: Path, registry: Registry, accept_old_keys: bool = False) -> dict[str, Any]:
    """Publishes a backup as the next generation, or as the first one where the registry is lost.

    Returns also what that undoes. `accept_old_keys`: also if it opens a tenant with keys, or if a revoked key works again. The
    keys of a deleted tenant are revoked, and of a lost registry nobody knows more than its newest snapshot says.
    """
    try:
        manifest = msgspec.json.decode((source / MANIFEST).read_bytes(), type=_Manifest)
    except FileNotFoundError:
        raise InvalidInput(f"{source} is not a backup, because {MANIFEST} is missing: name a folder of `hplm backup`") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Broken(f"{source / MANIFEST} does not describe a backup ({error}): use another one") from None
    if manifest.format != FORMAT:
        raise InvalidInput(
            f"{source} has format {manifest.format!r}, but this version of hplm reads {FORMAT}: restore it with the version "
            "that wrote it, or begin a registry without it by `hplm begin`"
        )
    if manifest.export != registry.exported.export:
        raise InvalidInput(f"{source} belongs to another export: name the repository that it was served with")
    kept = Registry(Folder(source), registry.exported)
    try:
        pointer = Pointer.read((source / CURRENT).read_bytes(), source / CURRENT)
    except FileNotFoundError:
        raise Broken(f"{source} has no {CURRENT}: use another backup") from None
    snapshot = kept.at(pointer)
    lost = None if is_begun(registry.store, anew=True) else registry.newest_remaining()

    def undone_in(now: Mapping[str, Tenant]) -> dict[str, list[str]]:
        undone = _undone({} if lost is not None and not lost.generation else now, snapshot.tenants)
        if any(undone.values()) and not accept_old_keys:
            opened, revived, returned = (some(names) or "none" for names in undone.values())
            raise InvalidInput(
                f"restoring {source} opens tenants with keys to everybody ({opened}), lets revoked keys work again ({revived}) "
                f"and brings tenants back as the backup has them ({returned}): nothing was changed. Give --accept-old-keys to "
                "restore it, and then add keys, revoke them or delete tenants again"
            )
        return undone

    def edit(change: Change) -> dict[str, Any]:
        undone = undone_in(change.tenants)
        done = {"generation": _restored(change, snapshot), "backed_up": snapshot.generation, **undone}
        return {**msgspec.structs.asdict(manifest), **done}

    served = lost if lost is not None else registry.current()
    undone_in({tenant.id: tenant for tenant in served.tenants})  # before anything is copied
    registry.store.expect_room(bytes_in(source), f"the backup in {source}")
    needed = needed_by(snapshot) - needed_by(registry.exported)
    if missing := sorted(name for name in needed if not (source / name).exists()):
        raise Broken(f"{source} has no {missing[0]}: use another backup")
    for name in objects_of(kept.store, needed):
        registry.store.put(name, source / name)
    done: dict[str, Any] = {}
    if lost is not None and registry.begin_with(
        "restore", lambda own: done.update(edit(own)), pointer.lease_s, lost, pointer.lineage
    ):
        return done
    return registry.change("restore", edit)


def _undone(now: Mapping[str, Tenant], backed_up: Iterable[Tenant]) -> dict[str, list[str]]:
    """Returns which tenants a restore opens to everybody, which revoked keys work again, and which deleted tenants return."""
    opened: list[str] = []
    revived: list[str] = []
    returned: list[str] = []
    for tenant in backed_up:
        served = now.get(tenant.id)
        if served is None:
            returned.append(tenant.id)
        elif served.keys and not tenant.keys:
            opened.append(tenant.id)
        elif served.keys:
            known = {key.digest for key in served.keys}
            valid = [key for key in tenant.keys if not key.expires or time.time() < key.expires]
            revived += [f"{key.id} of {tenant.id}" for key in valid if key.digest not in known]
    return {"opened": opened, "revived": revived, "returned": returned}


def _restored(change: Change, snapshot: Snapshot) -> int:
    """Puts back what was served, but no generation, uid, address or version that was used since is used again."""
    ledger = snapshot.ledger
    if change.generation <= snapshot.generation:  # the registry is lost
        change.generation = snapshot.generation + LOST
    used = {tenant_id: change.next_version(tenant_id) - 1 for tenant_id in change.tenants}
    change.tenants = {tenant.id: tenant for tenant in snapshot.tenants}
    change.branches = list(snapshot.branches)
    change.before = {tenant.id: tenant for tenant in ledger.before}
    change.next_uid = max(change.next_uid, ledger.next_uid)
    change.next_address = max(change.next_address, ledger.next_address)
    last = {name: max(used.get(name, 0), ledger.last_versions.get(name, 0)) for name in change.tenants}
    change.last_versions = {name: version for name, version in last.items() if version > change.tenants[name].version}
    change.details = {"from_generation": snapshot.generation}
    return change.generation
