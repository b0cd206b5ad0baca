"""Files of a store are complete under their final names, and damaged ones are refused; a packed root is the same elsewhere."""

import errno
import io
import json
import os
import shutil
import tarfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from builder.publish.export import check_export
from builder.publish.live import update_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.pack import MANIFEST, pack_root, unpack_root
from builder.store.resumable import PLAN, write_json
from builder.store.store import FORMAT, Store, TenantVersion
from builder.store.verification import store_parts
from hplm.adapters.record import has_content
from hplm.cli.main import main
from hplm.disk import NoSpace
from hplm.errors import Broken, InvalidInput
from hplm.model.weights import load_weights
from hplm.tenants.manager import Manager
from testing.random_store import random_table, random_tenant
from testing.toy import make_decoder
from tests.builder.stores import full_disk, grow, interrupted, make_store, meanwhile, rooted
from tests.cli.commands import printed
from tests.places import make_place
from tests.support.killed import content
from tests.support.message import mentioning, mentions


def test_files_are_synced_before_they_get_their_final_names(tmp_path, monkeypatch):
    done = []

    def noted(call):
        def noting(*given):
            done.append(tuple(os.readlink(f"/proc/self/fd/{one}") if isinstance(one, int) else str(one) for one in given))
            return call(*given)

        return noting

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    store = make_store(tmp_path / "store")
    moved = {given[1]: (given[0],) == before for before, given in pairwise(done) if len(given) == 2}
    assert moved.keys() == {str(path) for path in store.folder.rglob("*") if path.is_file()} and all(moved.values())
    assert list(moved)[-1] == str(store.folder / "store.json")


@pytest.fixture
def store(tmp_path):
    store = make_store(tmp_path / "store")
    for name, rank in (("acme", 4), ("bare", 0)):
        random_tenant(store, TenantVersion(name, 1, "root", 1, "classify", ["a", "b"], rank), 0.3, seed=1)
    store.save_masked_head("root", 1, {"bias": torch.ones(3)})
    return store


READERS = {
    "upper.safetensors": Store.upper,
    "lower/root-1.safetensors": lambda store: store.lower("root", 1),
    "lower/root-1.head.safetensors": lambda store: store.masked_head("root", 1),
    "tenants/acme/1/*.safetensors": lambda store: store.tenant_weights(store.tenant("acme")),
}


@pytest.mark.parametrize("name", READERS)
def test_weights_that_are_damaged_or_lost_are_refused(store, name):
    assert store.tenant_weights(store.tenant("bare"))[0] is None  # it needs no adapter
    (path,) = store.folder.glob(name)
    whole = path.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for data in (flipped, whole[:-1], b""):
        path.write_bytes(data)
        with pytest.raises(Broken, match=mentioning(path)):
            READERS[name](store)
    path.unlink()
    if name == "lower/root-1.head.safetensors":  # not every branch has one
        assert store.masked_head("root", 1) is None
    else:
        with pytest.raises(Broken, match=mentioning(path.parent)):
            READERS[name](store)


@torch.no_grad()
def test_a_decoders_matrices_take_16_bits_if_these_hold_them(tmp_path):
    """An encoder's take 32. A file of 32 bits is read as before: tests/server/test_releases.py."""
    store = make_decoder(tmp_path / "chat", [], [])
    upper, lower, path = store.upper(), store.lower("root", 1), store.folder / "upper.safetensors"
    upper.layers[0].qkv.weight[0, 0] = 1e5
    store.save_upper(upper)
    store.save_lower("root", 1, lower)
    wide = {name for name, own in load_weights(path).items() if own.dtype is torch.float32}
    assert wide == {"layers.0.qkv.weight"} | {name for name, own in upper.state_dict().items() if own.ndim == 1}
    assert load_weights(store.folder / "lower/root-1.safetensors")["words.weight"].dtype is torch.float16
    for name, own in store.upper().state_dict().items():
        assert own.dtype is torch.float32 and torch.allclose(own, upper.state_dict()[name], rtol=1e-3, atol=1e-6), name
    other = {own.dtype for own in load_weights(make_store(tmp_path / "bert").folder / "upper.safetensors").values()}
    assert other == {torch.float32}


def test_weights_without_a_checksum_are_refused(tmp_path):
    save_file({"bias": torch.arange(3.0)}, tmp_path / "old.safetensors")
    with pytest.raises(Broken, match="checksum"):
        load_weights(tmp_path / "old.safetensors")


def test_a_tenant_that_is_deleted_while_it_is_read_is_none_and_no_error(store):
    assert meanwhile(store, "tenant_versions", lambda: store.remove_tenant("acme")).tenant("acme") is None


def test_a_version_has_the_same_bytes_in_the_store_an_export_and_a_registry(tmp_path):
    store, repository, state = make_place(tmp_path)
    update_tenant(Manager.open(repository, state), store, "tenant-0")
    (path,) = store.tenant_folder("tenant-0", 1).glob("*.safetensors")
    (served,) = (state / "toy/records").glob(f"*-{path.name}")
    assert path.read_bytes() == (repository / "toy/1/records" / path.name).read_bytes() == served.read_bytes()
    assert has_content(path.name, path.read_bytes())


@pytest.mark.parametrize(("number", "named"), [(2, "hplm build root --model /nowhere/bert"), (FORMAT + 1, "later version")])
def test_a_store_of_another_format_says_how_to_get_one_that_is_read(store, number, named):
    (store.folder / "store.json").write_text(json.dumps({"format": number, "model": "/nowhere/bert"}))
    with pytest.raises(InvalidInput, match=mentioning("store.json", number, FORMAT, named)):
        Store(store.folder)


def test_a_store_whose_root_is_not_finished_says_how_to_finish_it(store):
    (working := store.work_folder("root", 1)).mkdir(parents=True)
    write_json(working / PLAN, {})
    commands = partial(store.latest, "root"), partial(store_parts, store.folder), partial(check_export, store, ServingOptions())
    for command in commands:
        with pytest.raises(InvalidInput, match=mentioning(store.folder, "hplm build root", "interrupted")):
            command()
    (store.folder / "store.json").unlink()
    with pytest.raises(InvalidInput, match=mentioning(store.folder, "hplm build root", "interrupted")):
        Store(store.folder)
    with pytest.raises(InvalidInput, match="is not a store"):
        Store(working / PLAN)  # a file


def test_an_unknown_tenant_is_told_the_near_names_and_how_many_there_are(store, monkeypatch):
    monkeypatch.setattr(store, "tenant_ids", lambda: [f"customer-{number:02}" for number in range(30)])
    assert mentions(store.unknown("custmer-29"), "customer-29", "20 more") and not mentions(store.unknown("x"), "customer-10")


def test_a_broken_tenant_stops_no_command_for_another(store):
    (path,) = (store.folder / "tenants" / "bare" / "1").glob("*.safetensors")
    path.write_text("{")
    assert store.tenant("acme") == store.tenant_version("acme", 1) and store.tenant("*") is None
    with pytest.raises(InvalidInput, match=mentioning("'none'", "acme, bare")):
        store.known_tenant("none")
    with pytest.raises(Broken, match=mentioning(path)):
        store.tenant("bare")
    random_tenant(store, TenantVersion("acme", 10, "root", 1, "classify", ["a", "b"], 0), 0.3, seed=1)
    random_tenant(store, TenantVersion("bare", 9, "root", 1, "classify", ["a", "b"], 0), 0.3, seed=1)
    newest = [(tenant.id, tenant.version) for tenant in store.tenants()]
    assert newest == [("acme", 10), ("bare", 9)]


@pytest.fixture
def origin(tmp_path):
    """A store with a root of two versions, a domain and a tenant, whose model is not here."""
    store = rooted(tmp_path)
    grow(store, "root", 9)
    random_table(store, "bio", 1, ("root", 1), 1000, seed=4)
    random_tenant(store, TenantVersion("acme", 1, "root", 1, "classify", ["a", "b"], 4), 0.3, seed=1)
    stored = json.loads((store.folder / "store.json").read_text())
    (store.folder / "store.json").write_text(json.dumps({**stored, "model": "/nowhere/bert"}))
    return store


@pytest.fixture
def file(origin, tmp_path):
    pack_root(origin, tmp_path / "root.tar")
    return tmp_path / "root.tar"


def test_an_unpacked_root_is_the_newest_version_of_the_packed_one(origin, tmp_path, capsys):
    file, folder = tmp_path / "root.tar", tmp_path / "there"
    printed(capsys, "root", "pack", "--store", origin.folder, file)
    assert main(["root", "unpack", "--store", str(folder), str(file)]) == 0
    assert mentions(capsys.readouterr().err, "/nowhere/bert", "--model")
    there = Store(folder)
    assert (there.domains(), there.tenants()) == ([("root", 2)], [])
    assert content(folder).items() <= content(origin.folder).items() and there.has_lower("root", 2)
    assert not [wrong for part in store_parts(folder) for wrong in part.check(part.path, lambda done: None)]
    pack_root(there, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == file.read_bytes()
    grown = [grow(one, "root", 8) for one in (origin, there)]
    assert (grown[0].folder / "values").read_bytes() == (grown[1].folder / "values").read_bytes()


def test_the_model_can_be_set_and_the_folder_be_the_current_one(file, tmp_path, monkeypatch):
    for folder in (tmp_path / "model", tmp_path / "here"):
        folder.mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["root", "unpack", "--store", ".", str(file), "--model", str(tmp_path / "model")]) == 0
    assert Store(Path(".")).model == str(tmp_path / "model")


def test_a_store_is_not_overwritten_and_without_room_nothing_is_written(origin, file, tmp_path):
    before = content(tmp_path)
    with pytest.raises(InvalidInput, match=mentioning(origin.folder, "--store")):
        unpack_root(file, origin.folder)
    with pytest.raises(InvalidInput, match=mentioning(tmp_path)):
        pack_root(origin, tmp_path)
    with full_disk(), pytest.raises(NoSpace, match=mentioning("1,000 bytes", tmp_path)):
        pack_root(origin, tmp_path / "again.tar")
    with full_disk(), pytest.raises(NoSpace, match=mentioning("1,000 bytes", tmp_path, "--store")):
        unpack_root(file, tmp_path / "there")
    assert content(tmp_path) == before and not (tmp_path / "there").exists()


def test_what_a_failed_or_killed_command_left_takes_no_room_from_the_next_one(origin, file, tmp_path, monkeypatch):
    left = tmp_path / "again.tar.writing", tmp_path / "there" / "unpacked-0.writing" / "upper.safetensors"
    with monkeypatch.context() as patch:  # the disk fills up meanwhile
        patch.setattr(tarfile.TarFile, "addfile", fails := Mock(side_effect=OSError(errno.ENOSPC, "no space")))
        with pytest.raises(OSError, match="no space"):
            pack_root(origin, tmp_path / "again.tar")
    assert fails.called and not left[0].exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0 if any(one.exists() for one in left) else 10**9))
    left[1].parent.mkdir(parents=True)
    acts = partial(pack_root, origin, tmp_path / "again.tar"), partial(unpack_root, file, tmp_path / "there")
    for leave, act in zip(left, acts, strict=True):
        leave.write_bytes(b"left")
        act()
    assert (tmp_path / "again.tar").read_bytes() == file.read_bytes() and Store(tmp_path / "there").domains()


def test_a_root_that_was_half_unpacked_is_not_taken_for_another(origin, file, tmp_path, monkeypatch):
    pack_root(rooted(tmp_path / "two"), other := tmp_path / "other.tar")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # killed while it moves files
        patch.setattr("builder.store.pack._moved_out", interrupted)
        unpack_root(file, there := tmp_path / "there")
    for given in ((other, there), (file, there, "moved")):
        with pytest.raises(InvalidInput, match=mentioning(there, given[0], "--store")):
            unpack_root(*given)
    assert unpack_root(file, there).domains() == [("root", 2)]


def test_a_file_that_cannot_get_its_name_leaves_nothing(tmp_path):
    (tmp_path / "taken" / "by a folder").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "taken", {})
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_damaged_file_is_named_and_leaves_nothing_behind(origin, file, tmp_path):
    whole, there = file.read_bytes(), tmp_path / "there"
    at = whole.index((origin.folder / "upper.safetensors").read_bytes()) + 5000
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


FILE = {"bytes": 1, "sha256": "0"}
BAD = [  # a manifest, the name of the file behind it, and what the error names
    *(({"format": 1, "files": {name: FILE}}, name, [name]) for name in ("../outside", "/outside", "link")),
    ({"format": 7, "files": {"link": FILE}}, "link", ["bad.tar", 7, 1]),
    *(({"format": 1, "files": files}, "more", ["bad.tar"]) for files in (None, [], {}, {"more": 1}, {"more": {"sha256": 0}})),
    *((manifest, "more", ["bad.tar"]) for manifest in ("{", [])),
]


@pytest.mark.parametrize(("manifest", "name", "named"), BAD)
def test_a_file_that_would_leave_the_store_or_that_its_manifest_does_not_describe_is_refused(tmp_path, manifest, name, named):
    manifest = manifest if manifest == "{" else json.dumps(manifest)
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        member = tarfile.TarInfo(MANIFEST)
        member.size = len(manifest)
        archive.addfile(member, io.BytesIO(manifest.encode()))
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises((Broken, InvalidInput), match=mentioning(*named)):
        unpack_root(tmp_path / "bad.tar", tmp_path / "there")
    assert not (tmp_path / "outside").exists() and not (tmp_path / "there").exists()
