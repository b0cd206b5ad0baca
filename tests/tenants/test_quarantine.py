"""Which files in a folder where anybody may write quarantine a tenant."""

import os
from pathlib import Path

import pytest

from hplm.tenants.quarantine import SECONDS, Quarantine

NOW = 1e9


@pytest.fixture
def seen_by(tmp_path):
    """Returns the quarantine of one folder as a user sees it."""
    return lambda user: Quarantine(Path("repository/toy"), tmp_path, user)


@pytest.fixture
def toy(seen_by):
    return seen_by(None)


def aged(toy, tenant_id, mtime):
    """Puts a tenant into quarantine at this time. Returns the file."""
    toy.put(tenant_id)
    file = max(toy._folder.iterdir(), key=lambda path: path.stat().st_mtime)
    os.utime(file, (mtime, mtime))
    return file


def test_a_server_believes_only_its_own_files_and_a_command_of_root_those_of_the_servers_user(toy, seen_by):
    file, root, other = aged(toy, "acme", NOW), seen_by(0), seen_by(os.getuid() + 1)
    assert toy.tenants(NOW, own=True) == {"acme"}
    with pytest.raises(OSError):
        other.put("acme")
    for now in (NOW, NOW + SECONDS):
        assert other.tenants(now, own=True) == frozenset() == other.tenants(now)
    if os.getuid() == 0:
        os.chown(file, 1000, -1)
    assert root.tenants(NOW) == {"acme"}
    assert root.tenants(NOW, own=True) == frozenset()


NO_FILES = {
    "link": lambda path, target: path.symlink_to(target),
    "folder": lambda path, _: path.mkdir(),
    "pipe": lambda path, _: os.mkfifo(path),
}


@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_quarantines_nobody_and_is_left_alone(toy, tmp_path, make):
    target, path = tmp_path / "target", aged(toy, "acme", NOW)
    path.unlink()
    target.touch()
    os.utime(target, (NOW, NOW))
    make(path, target)
    with pytest.raises(OSError):
        toy.put("acme")
    for now in (path.lstat().st_mtime, path.lstat().st_mtime + SECONDS):
        assert toy.tenants(now, own=True) == frozenset()
    assert os.path.lexists(path) and target.stat().st_mtime == NOW


def test_a_quarantine_begins_again_and_a_clock_that_was_set_back_does_not_keep_it_for_ever(toy):
    aged(toy, "acme", NOW)
    aged(toy, "acme", NOW + 60)
    assert toy.tenants(NOW + SECONDS) == {"acme"}
    aged(toy, "beta", NOW + SECONDS - 1)
    assert toy.tenants(NOW) == {"acme", "beta"}
    aged(toy, "beta", NOW + SECONDS)
    assert toy.tenants(NOW) == {"acme"}
