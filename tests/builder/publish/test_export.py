"""An export: what it writes, that it never overwrites another one, its precision, and what it refuses."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from builder.publish.export import export
from builder.publish.model_configs import ALIAS, ServingOptions
from builder.publish.precision import EightBits, measure_eight_bits
from builder.store.store import TenantVersion
from hplm.disk import NoSpace
from hplm.engine.backbone import Backbone
from hplm.engine.settings import EncoderSettings
from hplm.errors import Broken, InvalidInput
from hplm.model.weights import save_weights
from hplm.parameters import parameters_of
from hplm.plot.table import Table
from hplm.tenants.snapshot import Snapshot
from testing.random_store import random_backbone, random_store, random_tenant, random_tenants
from testing.toy import CHAT, CONFIG, SERVED, make_decoder
from tests.builder.stores import full_disk, give_other_values
from tests.cli.commands import flip, printed
from tests.support.message import mentioning, mentions


def test_a_backbone_s_three_model_folders_and_the_alias(toy):
    """Tenants' records are the store's, byte for byte: tests/builder/store/test_store.py."""
    assert sorted(path.name for path in toy.repository.iterdir()) == ["hplm", "toy", "toy-lookup", "toy-upper"]
    assert all((folder / "config.pbtxt").exists() and (folder / "1").is_dir() for folder in toy.repository.iterdir())
    backbone = Backbone(toy.folder)
    assert [tenant.uid for tenant in backbone.view.snapshot.tenants] == list(range(1, len(SERVED) + 1))
    for branch in backbone.view.snapshot.branches:
        Table(toy.folder / "plot" / branch.folder).verify()
    modes = {path.stat().st_mode & 0o777 for path in toy.repository.rglob("*") if path.is_file()}
    assert len(modes) == 1  # in the container, the server runs as another user than the export


def test_a_decoders_lower_layers_come_with_its_tables_and_equal_weights_are_in_memory_once(tmp_path):
    """An encoder's, and those of an export without them, are not served: then lookups shorten the windows."""
    store = make_decoder(tmp_path / "store", [TenantVersion("plain", 1, "law", 1, "generate", [], 0)], ["law"])
    lower = store.lower("law", 1)
    lower.words = store.lower("root", 1).words
    store.save_lower("law", 1, lower)
    export(store, tmp_path / "repository", ServingOptions())
    version = tmp_path / "repository/chat/1"
    backbone = Backbone(version)
    found = {domain: backbone.lower(backbone.view.forest.chain(domain, 1).domain) for domain in ("root", "law")}
    for domain, own in found.items():
        assert all(torch.equal(weight, own.state_dict()[name]) for name, weight in store.lower(domain, 1).state_dict().items())
    assert found["root"].words.weight.data_ptr() == found["law"].words.weight.data_ptr()
    assert found["root"].layers[0].qkv.weight.data_ptr() != found["law"].layers[0].qkv.weight.data_ptr()

    flip(version / "plot/law/1/lower.safetensors", -5)
    assert mentions(str(Backbone(version).view.forest.failures()), "law", "lower.safetensors", "hplm export")
    (version / "plot/law/1/lower.safetensors").unlink()
    with pytest.raises(InvalidInput, match=mentioning(version, "plot/law/1/lower.safetensors", "--replace")):
        export(store, tmp_path / "repository", ServingOptions())
    backbone = Backbone(version)
    assert backbone.lower(backbone.view.forest.chain("law", 1).domain) is None


def test_an_export_never_overwrites_another_one_unless_it_is_told_to(tmp_path):
    repository, version = tmp_path / "repository", tmp_path / "repository/toy/1"
    store, fewer = (random_store(tmp_path / str(n), CONFIG, random_tenants(n, 2, 2), corpus_tokens=500) for n in (2, 1))

    def files():
        return {path: path.stat().st_ino for path in version.rglob("*")}

    (record,) = store.tenant_folder("tenant-1", 1).glob("*.safetensors")
    flip(record, -5)
    with pytest.raises(Broken, match=mentioning(record)):
        export(store, repository, ServingOptions())
    assert not version.exists()
    flip(record, -5)
    export(store, repository, ServingOptions())
    before = files()
    with pytest.raises(InvalidInput, match=mentioning(version, "hplm tenant publish", "--repository", "--replace")):
        export(fewer, repository, ServingOptions())
    export(store, repository, ServingOptions(policy="fcfs", slots=8))  # the same content with other options
    assert files() == before and '"8"' in (repository / "toy-upper/config.pbtxt").read_text()
    assert not export(store, repository, ServingOptions()).is_new
    (version / "upper.safetensors").unlink()
    assert export(store, repository, ServingOptions(), replace=True).is_new and files().keys() == before.keys()  # mended
    assert export(fewer, repository, ServingOptions(), replace=True).tenants == 1
    assert len(Backbone(version).view.snapshot.tenants) == 1
    assert [path.name for path in version.parent.iterdir() if path.is_dir()] == ["1"]


def test_settings_change_although_a_tenant_was_built_and_published_since(tmp_path):
    repository, version = tmp_path / "repository", tmp_path / "repository/toy/1"
    store = random_store(tmp_path / "store", CONFIG, random_tenants(2, 2, 2), corpus_tokens=500)

    def settings(**own):
        return export(store, repository, ServingOptions(dtype="fp32", **own), settings_only=True)

    with pytest.raises(InvalidInput, match=mentioning(version, "--settings-only")):
        settings()
    assert not repository.exists()
    export(store, repository, ServingOptions(dtype="bf16"))
    random_tenant(store, TenantVersion("later", 1, "root", 1, "classify", ["a", "b"], 4), 0.3, seed=1)
    before = {path: path.stat().st_ino for path in version.rglob("*")}
    with pytest.raises(InvalidInput, match=mentioning(version, "hplm tenant publish", "--settings-only")):
        export(store, repository, ServingOptions(dtype="fp32"))
    done = settings()
    assert (done.tenants, done.is_new) == (2, False) and {path: path.stat().st_ino for path in version.rglob("*")} == before
    assert parameters_of(repository / "toy-upper/config.pbtxt")["dtype"] == "fp32"
    (store.folder / "upper.safetensors").unlink()  # the export has a link to it
    other_layers(store)
    with pytest.raises(InvalidInput, match=mentioning(version, store.folder)):
        settings()


def other_layers(store):
    save_weights(random_backbone(store.config, 7)[1].state_dict(), store.folder / "upper.safetensors")


def test_the_name_of_an_export_depends_on_all_its_content(tmp_path):
    def name(number, change=lambda store: None, **options):
        store = random_store(tmp_path / f"store-{number}", CONFIG, random_tenants(2, 2, 2), corpus_tokens=500, **options)
        change(store)
        export(store, tmp_path / str(number), ServingOptions())
        return Snapshot.load(tmp_path / str(number) / "toy/1/tenants.json").export

    first = name(0)
    assert name(1) == first
    others = name(2, spread=0.5), name(3, other_layers), name(4, lambda store: give_other_values(store, "root", 1))
    assert len({first, *others}) == 4


def test_an_export_removes_the_admin_model_of_an_earlier_commit_and_no_other_model_of_its_name(toy, tmp_path):
    for backend, stays in (("hplm_admin", False), ("hplm_whole", True)):
        (tmp_path / "toy-admin").mkdir()
        (tmp_path / "toy-admin/config.pbtxt").write_text(f'name: "toy-admin"\nbackend: "{backend}"\n')
        export(toy.store, tmp_path, ServingOptions(device="cuda:7"))  # this machine may lack the device
        assert (tmp_path / "toy-admin").exists() == stays and '"cuda:7"' in (tmp_path / "toy-upper/config.pbtxt").read_text()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs another file system")
def test_tables_are_copied_to_another_file_system_only_if_it_has_room(toy, tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as there, full_disk():
        export(toy.store, tmp_path, ServingOptions())  # links, which take no room
        if Path(there).stat().st_dev == toy.store.folder.stat().st_dev:
            pytest.skip("the store is on this file system")
        with pytest.raises(NoSpace, match=mentioning("1,000 bytes", there)):
            export(toy.store, Path(there), ServingOptions())


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    tenants = [TenantVersion("plain", 1, "root", 1, "generate", [], 0)]
    return random_store(tmp_path_factory.mktemp("chat") / "store", CHAT, tenants, corpus_tokens=300)


def test_a_decoder_is_one_decoupled_model_and_shares_its_name_with_no_encoder(chat, toy, tmp_path):
    export(chat, tmp_path / "r", ServingOptions(cache_tokens=512, max_sequences=3))
    assert {config.parent.name for config in (tmp_path / "r").glob("*/config.pbtxt")} == {CHAT.name, ALIAS}
    text = (tmp_path / "r" / CHAT.name / "config.pbtxt").read_text("utf-8")
    assert "decoupled: true" in text and "$" not in text
    assert parameters_of(tmp_path / "r" / CHAT.name / "config.pbtxt")["cache_tokens"] == "512"
    store = random_store(tmp_path / "store", replace(CONFIG, name=CHAT.name), random_tenants(1, 0, 2), corpus_tokens=300)
    for first, second in ((chat, store), (store, chat)):
        repository = tmp_path / f"repository-{first is store}"
        export(first, repository, ServingOptions())
        with pytest.raises(InvalidInput, match=mentioning(CHAT.name, "--repository")):
            export(second, repository, ServingOptions(), replace=True)


@pytest.mark.parametrize(
    "speed, change, auto", [(1.5, 0.05, "int8"), (1.05, 0.05, "auto"), (0.5, 0.0, "auto"), (1.5, 0.2, "auto")]
)
def test_auto_is_int8_only_if_that_is_faster_and_close(speed, change, auto):
    assert EightBits("fp32", speed, change).auto == auto


@pytest.mark.parametrize(("speed", "name"), [(1.75, "int8"), (0.75, "fp32")])
def test_an_export_records_and_prints_the_measurement(toy, tmp_path, capsys, monkeypatch, speed, name):
    measured = EightBits("fp32", speed, 0.043)
    monkeypatch.setattr("builder.publish.precision.measure_eight_bits", lambda *_, **__: measured)  # it is the machine's
    command, config = (
        ["export", "--store", toy.store.folder, "--device", "cpu", "--repository"],
        tmp_path / "a/toy-upper/config.pbtxt",
    )
    assert str(measured) in printed(capsys, *command, tmp_path / "a") and str(measured) in config.read_text()
    assert (EncoderSettings.read(parameters_of(config)).precision.name == "int8") == (name == "int8")
    assert "x as fast as" not in printed(capsys, *command, tmp_path / "b", "--dtype", "int8")


def test_products_in_8_bits_change_vectors_little(tmp_path):
    bare = random_store(tmp_path / "bare", CONFIG, [], corpus_tokens=500)  # without tenants it is measured on the root
    measured = measure_eight_bits(bare, threads=1)
    assert measured.other in ("fp32", "bf16") and measured.speed > 0 and 0 < measured.change < 0.02
