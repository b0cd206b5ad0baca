"""A packed root becomes the same root elsewhere, and a damaged or foreign file becomes nothing."""

import io
import json
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from builder.store.pack import MANIFEST, pack_root, unpack_root
from builder.store.store import Store, TenantFile
from builder.store.verification import store_parts
from builder.tables.domain import UpdateOptions, update_domain
from hplm.cli.main import main
from hplm.errors import Broken, InvalidInput
from hplm.plot.room import NoSpace
from testing.random_store import random_stack, random_table, random_tenant
from tests.builder.tables.branches import CPU
from tests.builder.tables.test_domain import NO_TIME, corpus, rooted
from tests.support.killed import content
from tests.support.message import mentioning, mentions


@pytest.fixture
def store(tmp_path):
    """A store with a root, a domain and a tenant."""
    store = rooted(tmp_path)
    random_table(store, "bio", 1, ("root", 1), 1000, seed=4)
    random_tenant(store, TenantFile("acme", 1, "root", 1, "classify", ["a", "b"], 4), 0.3, seed=1)
    random_stack(store, "small", 1, seed=2)
    return store


def of_root(store):
    return {
        name: data
        for name, data in content(store.folder).items()
        if not name.startswith(("plot/bio", "tenants", "building", "counts/bio", "lower/bio"))
    }


def test_an_unpacked_root_is_the_packed_one(store, tmp_path):
    file = tmp_path / "root.tar"
    assert main(["root", "pack", "--store", str(store.folder), str(file)]) == 0
    assert main(["root", "unpack", "--store", str(tmp_path / "there"), str(file)]) == 0
    there = Store(tmp_path / "there")
    assert (
        there.stacks() == ["small"]
        and content(there.folder) == of_root(store)
        and there.domains() == [("root", 1)]
        and there.tenants() == []
    )
    assert not [wrong for part in store_parts(there.folder) for wrong in part.check(part.path, lambda done: None)]
    again = tmp_path / "again.tar"
    pack_root(there, again)
    assert again.read_bytes() == file.read_bytes()
    grown = [update_domain(one, "root", [corpus(tmp_path, 9)], UpdateOptions(), NO_TIME, CPU) for one in (store, there)]
    assert (grown[0].folder / "values").read_bytes() == (grown[1].folder / "values").read_bytes()


def test_the_newest_version_of_a_root_is_packed(store, tmp_path):
    update_domain(store, "root", [corpus(tmp_path, 9)], UpdateOptions(), NO_TIME, CPU)
    pack_root(store, tmp_path / "root.tar")
    there = unpack_root(tmp_path / "root.tar", tmp_path / "there")
    assert there.domains() == [("root", 2)] and there.has_lower("root", 2)
    assert there.chain_digest("root", 2) == store.chain_digest("root", 2)


def test_name_and_model_can_be_set(store, tmp_path, capsys):
    pack_root(store, tmp_path / "root.tar")
    folder = tmp_path / "model"
    folder.mkdir()
    options = ["--name", "other", "--model", str(folder), "--json"]
    assert main(["root", "unpack", "--store", str(tmp_path / "there"), str(tmp_path / "root.tar"), *options]) == 0
    there = Store(tmp_path / "there")
    assert (there.config.name, there.model) == ("other", str(folder))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["domain"] == "root"
    with pytest.raises(InvalidInput, match="'No Name'"):
        unpack_root(tmp_path / "root.tar", tmp_path / "elsewhere", name="No Name")


def test_a_store_is_not_overwritten(store, tmp_path):
    pack_root(store, tmp_path / "root.tar")
    before = content(store.folder)
    with pytest.raises(InvalidInput, match=mentioning(store.folder, "--store")):
        unpack_root(tmp_path / "root.tar", store.folder)
    assert content(store.folder) == before


def test_a_root_is_unpacked_into_the_current_folder(store, tmp_path, monkeypatch):
    pack_root(store, tmp_path / "root.tar")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    unpack_root(tmp_path / "root.tar", Path("."))
    assert content(Path(".")) == of_root(store)
    with pytest.raises(InvalidInput, match=mentioning(".")):
        pack_root(store, Path("."))


def test_what_has_no_room_is_neither_packed_nor_unpacked(store, tmp_path, monkeypatch):
    pack_root(store, tmp_path / "root.tar")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(NoSpace, match=mentioning("GB", tmp_path)):
        pack_root(store, tmp_path / "again.tar")
    with pytest.raises(NoSpace, match=mentioning("GB", tmp_path, "--store")):
        unpack_root(tmp_path / "root.tar", tmp_path / "there")
    assert not (tmp_path / "there").exists() and not list(tmp_path.glob("again*"))


def test_a_damaged_file_is_named_and_leaves_nothing_behind(store, tmp_path):
    file, there = tmp_path / "root.tar", tmp_path / "there"
    pack_root(store, file)
    whole = file.read_bytes()
    at = whole.index((store.folder / "upper.safetensors").read_bytes()) + 5000
    damaged = [
        (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], "upper.safetensors"),
        (whole[: len(whole) * 2 // 3], ""),
        (whole[: whole.index(b"upper.safetensors", 4096) // 512 * 512], "upper.safetensors"),
        (b"no archive", ""),
    ]
    for data, name in damaged:
        file.write_bytes(data)
        with pytest.raises((Broken, InvalidInput), match=mentioning(file, name)):
            unpack_root(file, there)
        assert not there.exists() and not list(tmp_path.glob("there*"))


def test_a_file_that_would_leave_the_store_is_refused(tmp_path):
    for name in ("../outside", "/outside", "link"):
        manifest = json.dumps({"format": 1, "files": {name: {"bytes": 1, "sha256": "0"}}}).encode()
        with tarfile.open(tmp_path / "bad.tar", "w") as archive:
            member = tarfile.TarInfo(MANIFEST)
            member.size = len(manifest)
            archive.addfile(member, io.BytesIO(manifest))
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)
        with pytest.raises((Broken, InvalidInput), match=mentioning(name)):
            unpack_root(tmp_path / "bad.tar", tmp_path / "there")
        assert not (tmp_path / "outside").exists() and not (tmp_path / "there").exists()


def test_another_format_says_what_to_do(tmp_path):
    manifest = json.dumps({"format": 7, "files": {}}).encode()
    with tarfile.open(tmp_path / "new.tar", "w") as archive:
        member = tarfile.TarInfo(MANIFEST)
        member.size = len(manifest)
        archive.addfile(member, io.BytesIO(manifest))
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "new.tar", 7, 1)):
        unpack_root(tmp_path / "new.tar", tmp_path / "there")


def test_a_model_that_is_not_here_is_said(store, tmp_path, capsys):
    stored = json.loads((store.folder / "store.json").read_text())
    (store.folder / "store.json").write_text(json.dumps({**stored, "model": "/nowhere/bert"}))
    pack_root(store, tmp_path / "root.tar")
    assert main(["root", "unpack", "--store", str(tmp_path / "there"), str(tmp_path / "root.tar")]) == 0
    assert mentions(capsys.readouterr().err, "/nowhere/bert", "--model")
