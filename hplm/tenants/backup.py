"""Backs up a live state into a folder, and restores it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from hplm.errors import Broken, InvalidInput
from hplm.plot.room import bytes_in, check_room
from hplm.tenants.manager import Manager
from hplm.tenants.registry import needed_banks
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state import State, sync

FORMAT = 1
MANIFEST = "backup.json"


def back_up(manager: Manager, target: Path) -> dict[str, Any]:
    """Copies all files that the newest generation needs, while no manager changes the state. Readers and requests go on.

    Tables are by far the largest part and never change, so managers do not wait while they are copied.
    """
    if target.exists():
        raise InvalidInput(f"{target} exists already: name a new folder")
    writing = target.with_name(f"{target.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    manager.registry.check_begun()
    state, copy = manager.state, State(writing)
    linked: list[str] = []
    with state.aside() as aside:
        with manager.registry.frozen() as (snapshot, database):
            needed = bytes_in(state.banks, *(state.tables / branch.folder for branch in snapshot.branches))
            check_room(writing, needed, f"the backup of {state.folder}", "name a folder on a larger disk")
            copy.snapshots.mkdir(parents=True)
            with sqlite3.connect(copy.registry) as registry:
                for line in database.iterdump():
                    if line not in ("BEGIN TRANSACTION;", "COMMIT;"):
                        registry.execute(line)
            registry.close()
            if snapshot.generation:
                snapshot.save(copy.snapshots / str(snapshot.generation))
            copy.current_file.write_text(f"{snapshot.generation}\n", "utf-8")
            for name in needed_banks(snapshot, database):
                if state.bank(name).exists():
                    copy.banks.mkdir(exist_ok=True)
                    shutil.copyfile(state.bank(name), copy.bank(name))
            for folder in (branch.folder for branch in snapshot.branches):
                if (state.tables / folder).is_dir():
                    if _link(state.tables / folder, aside / folder):
                        linked.append(folder)
                    else:
                        shutil.copytree(state.tables / folder, copy.tables / folder)
        for folder in linked:
            shutil.copytree(aside / folder, copy.tables / folder)
    manifest = {"format": FORMAT, "export": snapshot.export, "generation": snapshot.generation}
    (writing / MANIFEST).write_text(json.dumps(manifest) + "\n", "utf-8")
    _sync_all(writing)
    writing.rename(target)
    sync(target.parent)
    return manifest


def restore(source: Path, exported: Snapshot, state: State) -> dict[str, Any]:
    """Writes a backup into a state that does not exist yet, because readers may follow an existing state."""
    try:
        manifest: dict[str, Any] | list[Any] | None = json.loads((source / MANIFEST).read_text("utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"{source} is not a backup, because {MANIFEST} is missing: name a folder of `hplm backup`") from None
    except ValueError as error:
        raise Broken(f"{source / MANIFEST} is not JSON ({error}): use another backup") from None
    if not isinstance(manifest, dict) or "export" not in manifest:
        raise Broken(f"{source / MANIFEST} does not describe a backup: use another one")
    if manifest.get("format") != FORMAT:
        raise InvalidInput(
            f"{source} has format {manifest.get('format')!r}, but this version of hplm reads {FORMAT}: "
            "restore it with the version that wrote it"
        )
    if manifest["export"] != exported.export:
        raise InvalidInput(f"{source} belongs to another export: name the repository that it was served with")
    if state.folder.exists() and any(state.folder.iterdir()):
        raise InvalidInput(f"{state.folder} contains a state: stop its servers and move it away, or name another --state")
    check_room(state.folder, bytes_in(source), f"the backup in {source}", "name a --state on a larger disk")
    writing = state.folder.with_name(f"{state.folder.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    shutil.copytree(source, writing, ignore=shutil.ignore_patterns(MANIFEST))
    if state.folder.exists():
        state.folder.rmdir()
    _sync_all(writing)
    writing.rename(state.folder)
    sync(state.folder.parent)
    return manifest


def _link(source: Path, target: Path) -> bool:
    """Links a table's files, so that they stay if another manager removes the table. Returns False if it cannot link them."""
    target.mkdir(parents=True)
    try:
        for file in source.iterdir():
            os.link(file.resolve(), target / file.name)
    except OSError:
        return False
    return True


def _sync_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync(path)
