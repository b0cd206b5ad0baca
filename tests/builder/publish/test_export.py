import json
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, check_name
from hplm.adapters.bank import Bank
from hplm.engine.backbone import Backbone
from hplm.errors import InvalidInput
from hplm.model.checkpoint import random_backbone
from hplm.model.config import FORMAT
from hplm.plot.room import NoSpace
from hplm.plot.table import Table
from hplm.tenants.snapshot import Snapshot
from research.schemes.export import export_scheme
from testing.random_store import random_stack, random_store, random_tenants, random_values
from testing.toy import CONFIG, TENANTS
from tests.support.message import mentioning, mentions


def test_a_backbone_s_three_model_folders_and_the_alias(toy):
    assert sorted(path.name for path in toy.repository.iterdir()) == ["hplm", "toy", "toy-lookup", "toy-upper"]
    assert all((folder / "config.pbtxt").exists() and (folder / "1").is_dir() for folder in toy.repository.iterdir())
    backbone = Backbone(toy.folder)
    assert [tenant.uid for tenant in backbone.view.snapshot.tenants] == list(range(1, len(TENANTS) + 1))
    for branch in backbone.view.snapshot.branches:
        Table(toy.folder / "plot" / branch.folder).verify()
    for tenant in backbone.view.snapshot.tenants:
        stored, head = toy.store.tenant_weights(next(t for t in toy.store.tenants() if t.id == tenant.id))
        record = backbone.bank(tenant.head.bank).weights(tenant.head)[0]
        assert (record["weight"][: len(tenant.labels)] == head["weight"].to(record["weight"].dtype)).all()
        assert (record["weight"][len(tenant.labels) :] == 0).all()
        if stored is not None:
            weights = Bank(toy.folder / "adapters" / tenant.adapter.bank).weights(tenant.adapter)
            assert all((weights[1][name] == stored[1][name].to(weights[1][name].dtype)).all() for name in stored[1])


def test_all_models_that_answer_list_the_same_outputs(toy):
    listed = {}
    for model in ("toy", "toy-upper", "hplm"):
        config = (toy.repository / model / "config.pbtxt").read_text("utf-8")
        outputs = config[config.index("output [") :].split("\n]")[0]
        listed[model] = re.findall(r'name: "([A-Z]+)" +data_type: (\w+) +dims: \[([^]]*)\]', outputs)
    assert listed["toy-upper"].pop() == ("ONWARD", "TYPE_STRING", " 1 ")  # that only the model `hplm` asks for
    assert listed["toy"] == listed["toy-upper"] == listed["hplm"]
    assert ("LEVEL", "TYPE_INT32", " 1 ") in listed["toy"]
    ensemble = (toy.repository / "toy/config.pbtxt").read_text("utf-8")
    assert re.findall(r'output_map \{ key: "(\w+)" +value: "\1"', ensemble) == [name for name, *_ in listed["toy"]]


def test_all_exported_files_have_the_same_permissions(toy):
    """In the container, the server runs as another user than the export."""
    modes = {path: path.stat().st_mode & 0o777 for path in toy.repository.rglob("*") if path.is_file()}
    ours = (toy.folder / "tenants.json").stat().st_mode & 0o777
    assert all(mode == ours for mode in modes.values()), modes


def test_exporting_again_replaces_the_old_export(tmp_path):
    store = random_store(tmp_path / "store", CONFIG, random_tenants(2, 2, 2))
    export(store, tmp_path / "repository", ServingOptions())
    old = Path(tmp_path / "repository/toy/1/tenants.json").stat().st_ino
    export(store, tmp_path / "repository", ServingOptions(policy="fcfs", slots=8))
    assert Path(tmp_path / "repository/toy/1/tenants.json").stat().st_ino != old
    assert [path.name for path in Path(tmp_path / "repository/toy").iterdir() if path.is_dir()] == ["1"]
    assert '"8"' in Path(tmp_path / "repository/toy-upper/config.pbtxt").read_text()


def test_an_export_that_was_killed_between_its_renames_loses_no_copy(tmp_path, monkeypatch):
    store, rename = random_store(tmp_path / "store", CONFIG, random_tenants(2, 2, 2)), Path.rename
    export(store, tmp_path / "repository", ServingOptions())
    version = tmp_path / "repository/toy/1"
    inode = (version / "tenants.json").stat().st_ino

    def killed(path, target):
        if path.name == "1.new":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            export(store, tmp_path / "repository", ServingOptions())
    assert not version.exists()
    fewer = random_store(tmp_path / "fewer", CONFIG, random_tenants(1, 2, 2))
    with pytest.raises(InvalidInput, match=mentioning("tenant-1", "--replace")):
        export(fewer, tmp_path / "repository", ServingOptions())
    assert (version / "tenants.json").stat().st_ino == inode
    export(store, tmp_path / "repository", ServingOptions())
    assert sorted(path.name for path in version.parent.iterdir() if path.is_dir()) == ["1"]


def test_the_name_of_an_export_depends_on_all_its_content(tmp_path, monkeypatch):
    def name(folder, **options):
        store = random_store(folder / "store", CONFIG, random_tenants(2, 2, 2), corpus_tokens=500, **options)
        export(store, folder / "repository", ServingOptions())
        return Snapshot.load(folder / "repository/toy/1/tenants.json").export

    first = name(tmp_path / "a")
    assert name(tmp_path / "b") == first
    assert name(tmp_path / "c", spread=0.5) != first  # other adapters, of the same names and places
    with monkeypatch.context() as patch:
        patch.setattr("testing.random_store.random_backbone", lambda config, seed: random_backbone(config, 7))
        assert name(tmp_path / "d") != first
    monkeypatch.setattr("testing.random_store.random_values", lambda spec, seed: random_values(spec, 7))
    assert name(tmp_path / "e") != first


def test_stacks_are_exported_and_name_the_export(tmp_path):
    store = random_store(tmp_path / "store", CONFIG, random_tenants(2, 2, 2), corpus_tokens=500)
    folder = tmp_path / "repository/toy/1"

    def exported():
        export(store, tmp_path / "repository", ServingOptions())
        return Snapshot.load(folder / "tenants.json").export

    without = exported()
    assert not (folder / "stacks").exists() and Backbone(folder).stacks() == {}
    random_stack(store, "small", 1, seed=1)
    store.stack_file("large").with_suffix(".safetensors.writing").write_bytes(b"unfinished")
    first = exported()
    assert [path.name for path in (folder / "stacks").iterdir()] == ["small.safetensors"]
    (name, stack), *others = Backbone(folder).stacks().items()
    wanted = store.stack("small").state_dict()
    assert name == "small" and not others and len(stack.layers) == 1
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in stack.state_dict().items())
    random_stack(store, "small", 1, seed=2)
    second = exported()
    store.stack_file("small").rename(store.stack_file("tiny"))
    assert len({without, first, second, exported()}) == 4
    store.stack_file("tiny").unlink()
    assert exported() == without


def test_a_stack_that_does_not_fit_the_export_is_named_and_left_out(tmp_path, caplog):
    store = random_store(tmp_path / "store", CONFIG, random_tenants(1, 2, 2), corpus_tokens=500)
    random_stack(store, "deep", CONFIG.upper_layers, seed=1)
    random_stack(store, "small", 1, seed=1)
    export(store, tmp_path / "repository", ServingOptions())
    assert list(Backbone(tmp_path / "repository/toy/1").stacks()) == ["small"]
    assert mentions(caplog.text, tmp_path / "repository/toy/1/stacks/deep.safetensors", 2, "export")


def test_an_export_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    store = random_store(tmp_path / "store", CONFIG, random_tenants(2, 2, 2))
    export(store, tmp_path / "repository", ServingOptions())
    before = Path(tmp_path / "repository/toy/1/tenants.json").read_text()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builder.publish.records.write_bank", full)
    with pytest.raises(OSError, match="No space left"):
        export(store, tmp_path / "repository", ServingOptions())
    assert Path(tmp_path / "repository/toy/1/tenants.json").read_text() == before
    assert Backbone(tmp_path / "repository/toy/1").view.snapshot.tenants


def test_tenants_of_the_repository_are_removed_only_with_replace(tmp_path):
    export(random_store(tmp_path / "a", CONFIG, random_tenants(3, 2, 2)), tmp_path / "r", ServingOptions())
    smaller = random_store(tmp_path / "b", CONFIG, random_tenants(2, 2, 2))
    with pytest.raises(InvalidInput, match=mentioning(1, "tenant-2", "--replace")):
        export(smaller, tmp_path / "r", ServingOptions())
    assert export(smaller, tmp_path / "r", ServingOptions(), replace=True).tenants == 2


@pytest.mark.parametrize(
    "options, named",
    [
        (ServingOptions(batch_tokens=10), ["batch_tokens", 10, 64]),
        (ServingOptions(slots=1), ["'slots'", "'1'", 2]),
        (ServingOptions(plot_hot=-1), ["'plot_hot'", "'-1'"]),
        (ServingOptions(threads=-1), ["'threads'", "'-1'"]),
        (ServingOptions(queue_texts=0), ["'queue_texts'", "'0'"]),
        (ServingOptions(deadline_ms=-5.0), ["'deadline_ms'", "'-5.0'"]),
        (ServingOptions(packing="dense"), ["packing", "'dense'"]),
        (ServingOptions(device="gpu"), ["device", "'gpu'"]),
        (ServingOptions(journal="journal.jsonl"), ["'journal'", "'journal.jsonl'"]),
    ],
)
@pytest.mark.parametrize("scheme", ["hplm", "plot"])
def test_settings_that_cannot_serve_are_refused_before_anything_is_written(toy, tmp_path, options, named, scheme):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        export_scheme(toy.store, tmp_path, options, scheme)
    assert not list(tmp_path.iterdir())


def test_a_device_that_this_machine_lacks_can_be_exported(toy, tmp_path):
    export(toy.store, tmp_path, ServingOptions(device="cuda:7", packing="turbo"))
    assert '"cuda:7"' in (tmp_path / "toy-upper/config.pbtxt").read_text()


def test_an_export_without_admin_removes_the_admin_model_and_no_other_model_of_its_name(toy, tmp_path):
    export(toy.store, tmp_path, ServingOptions(admin=True))
    assert (tmp_path / "toy-admin/config.pbtxt").exists()
    export(toy.store, tmp_path, ServingOptions())
    assert not (tmp_path / "toy-admin").exists()
    (tmp_path / "toy-admin").mkdir()
    (tmp_path / "toy-admin/config.pbtxt").write_text('name: "toy-admin"\nbackend: "hplm_whole"\n')
    export(toy.store, tmp_path, ServingOptions())
    assert (tmp_path / "toy-admin/config.pbtxt").exists()


def test_a_store_without_tenants_is_not_exported(tmp_path):
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "store", "hplm build tenant")):
        export(random_store(tmp_path / "store", CONFIG, []), tmp_path / "r", ServingOptions())


def test_more_labels_than_the_largest_head_are_refused(tmp_path):
    store = random_store(tmp_path / "store", CONFIG, random_tenants(1, 0, 5000))
    with pytest.raises(InvalidInput, match=mentioning(5000)):
        export(store, tmp_path / "r", ServingOptions())


def test_a_store_or_repository_of_another_format_is_refused(toy, tmp_path):
    copy = shutil.copytree(toy.store.folder, tmp_path / "store")
    (copy / "store.json").write_text(json.dumps({"format": 99, "model": "m"}))
    with pytest.raises(InvalidInput, match=mentioning(copy / "store.json", 99)):
        Store(copy)
    with pytest.raises(InvalidInput, match=mentioning(tmp_path, "hplm build root")):
        Store(tmp_path)
    version = shutil.copytree(toy.folder, tmp_path / "1")
    (version / "backbone.json").write_text(
        (version / "backbone.json").read_text().replace(f'"format": {FORMAT}', '"format": 99')
    )
    with pytest.raises(InvalidInput, match=mentioning(version / "backbone.json", 99)):
        Backbone(version)


@pytest.mark.parametrize("name", ["", "Acme", "a/b", "../x", "-a", "a" * 65, "ü", "a b"])
def test_names_are_safe_as_folders(name):
    with pytest.raises(InvalidInput, match=mentioning("tenant", repr(name))):
        check_name("tenant", name)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs another file system")
def test_tables_are_copied_to_another_file_system_only_if_it_has_room(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    export(toy.store, tmp_path, ServingOptions())  # links, which take no room
    with tempfile.TemporaryDirectory(dir="/dev/shm") as there:
        if Path(there).stat().st_dev == toy.store.folder.stat().st_dev:
            pytest.skip("the store is on this file system")
        with pytest.raises(NoSpace, match=mentioning("GB", there)):
            export(toy.store, Path(there), ServingOptions())
