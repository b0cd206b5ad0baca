"""What a backup and a restore write is on disk with its name. tests/tenants/test_truth.py is about changes."""

import os
from pathlib import Path

import pytest

from hplm.tenants.backup import back_up, restore
from hplm.tenants.manager import Manager
from hplm.tenants.state import State
from tests.places import knowledge

pytestmark = pytest.mark.slow


def test_new_files_keep_their_names_without_power(place, tmp_path, monkeypatch):
    """A file system may forget a new name until its folder is synced."""
    store, repository, state = place
    live, synced = Manager.open(repository, state), set()
    live.add("new-a", knowledge(store, "new-a"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
    back_up(live, tmp_path / "saved" / "one")
    restore(tmp_path / "saved" / "one", live.exported, State(tmp_path / "again" / "toy"))
    assert {tmp_path / "saved", tmp_path / "again"} <= synced
