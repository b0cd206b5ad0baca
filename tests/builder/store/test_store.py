"""Files under their final names are complete, and damaged ones are refused."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from builder.evaluation.tenant import find_tenant
from builder.store.store import Store, TenantFile
from hplm.errors import Broken, InvalidInput
from hplm.model.weights import load_weights
from hplm.model.windows import TRIGRAMS
from testing.random_store import random_stack, random_tenant
from tests.builder.tables.branches import make_store
from tests.support.message import mentioning

TENANT = '{"id": %s, "version": %s, "domain": "root", "domain_version": 1, "task": "tag", "labels": [], "rank": 0}'


def test_files_are_synced_before_they_get_their_final_names(tmp_path, monkeypatch):
    synced, named, fsync, replace = [], {}, os.fsync, os.replace

    def noted(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def moved(source, target):
        assert synced[-1] == str(source)
        named[str(Path(target).relative_to(tmp_path))] = len(named)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", moved)
    store = make_store(tmp_path, TRIGRAMS)
    written = {str(path.relative_to(tmp_path)) for path in store.folder.rglob("*") if path.is_file()}
    assert written == set(named) and list(named)[-1] == "store/store.json"


@pytest.fixture
def store(tmp_path):
    store = make_store(tmp_path, TRIGRAMS)
    for name, rank in (("acme", 4), ("bare", 0)):
        random_tenant(store, TenantFile(name, 1, "root", 1, "classify", ["a", "b"], rank), 0.3, seed=1)
    store.save_masked_head("root", 1, {"bias": torch.ones(3)})
    random_stack(store, "small", 1, seed=3)
    return store


READERS = {
    "upper.safetensors": Store.upper,
    "lower/root-1.safetensors": lambda store: store.lower("root", 1),
    "lower/root-1.head.safetensors": lambda store: store.masked_head("root", 1),
    "stacks/small.safetensors": lambda store: store.stack("small"),
    "tenants/acme/1/head.safetensors": lambda store: store.tenant_weights(store.tenant("acme")),
    "tenants/acme/1/adapter.safetensors": lambda store: store.tenant_weights(store.tenant("acme")),
}


@pytest.mark.parametrize("name", READERS)
def test_weights_that_are_damaged_or_lost_are_refused(store, name):
    path = store.folder / name
    whole = path.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for content in (flipped, whole[:-1], b""):
        path.write_bytes(content)
        with pytest.raises(Broken, match=mentioning(path)):
            READERS[name](store)
    path.unlink()
    if name == "lower/root-1.head.safetensors":  # not every branch has one
        assert store.masked_head("root", 1) is None
    elif name == "stacks/small.safetensors":  # a stack without weights is unfinished
        assert store.stacks() == []
    else:
        with pytest.raises(Broken, match=mentioning(path)):
            READERS[name](store)


def test_a_tenant_without_an_adapter_and_weights_without_a_checksum_are_read(store, tmp_path):
    assert store.tenant_weights(store.tenant("bare"))[0] is None
    save_file({"bias": torch.arange(3.0)}, tmp_path / "old.safetensors")
    assert torch.equal(load_weights(tmp_path / "old.safetensors")["bias"], torch.arange(3.0))


def test_stacks_are_known_by_name_and_have_as_many_layers_as_their_file(store):
    random_stack(store, "9.b", 1, seed=4)
    assert store.stacks() == ["9.b", "small"] and Store(store.folder).stacks() == store.stacks()
    stack = store.stack("small")
    assert len(stack.layers) == stack.config.upper_layers == 1 and store.config.upper_layers == 2
    assert store.stack_report("small") == {} and not torch.equal(
        stack.layers[0].qkv.weight, store.stack("9.b").layers[0].qkv.weight
    )
    for name in ("large", "../upper", ""):
        with pytest.raises(InvalidInput, match=mentioning(repr(name), "9.b, small", "hplm build stack")):
            store.stack(name)


@pytest.mark.parametrize(
    "name, content",
    [
        ("store.json", "{"),
        ("store.json", "[]"),
        ("store.json", '{"format": 2}'),
        ("tenants/acme/1/tenant.json", ""),
        ("tenants/acme/1/tenant.json", '{"id": "acme"}'),
        ("tenants/acme/1/tenant.json", TENANT % ("null", 1)),
        ("tenants/acme/1/tenant.json", TENANT % ('"acme"', "[]")),
        ("tenants/acme/1/tenant.json", TENANT % ('"acme"', '1, "function": []')),
        ("tenants/acme/1/tenant.json", TENANT % ('"acme"', '1, "head_function": []')),
    ],
)
def test_a_damaged_description_is_named(store, name, content):
    (store.folder / name).write_text(content)
    with pytest.raises(Broken, match=mentioning(store.folder / name)):
        Store(store.folder).tenants()


def test_a_broken_tenant_stops_no_command_for_another(store):
    path = store.folder / "tenants" / "bare" / "1" / "tenant.json"
    path.write_text("{")
    assert store.tenant("acme") == store.tenant_version("acme", 1) and store.tenant("*") is None
    with pytest.raises(InvalidInput, match=mentioning("'none'", "acme, bare")):
        find_tenant(store, "none")
    with pytest.raises(Broken, match=mentioning(path)):
        store.tenant("bare")


def test_only_the_newest_versions_of_tenants_are_read(store):
    old = store.folder / "tenants" / "acme" / "1" / "tenant.json"
    random_tenant(store, TenantFile("acme", 10, "root", 1, "classify", ["a", "b"], 0), 0.3, seed=1)
    random_tenant(store, TenantFile("acme", 9, "root", 1, "classify", ["a", "b"], 0), 0.3, seed=1)
    old.write_text("{")
    assert [(tenant.id, tenant.version) for tenant in store.tenants()] == [("acme", 10), ("bare", 1)]


def test_a_tenant_that_another_process_deletes_is_not_missed(store, monkeypatch):
    def deleted(path):
        monkeypatch.undo()
        store.remove_tenant("acme")
        return TenantFile.read(path)

    monkeypatch.setattr("builder.store.store.TenantFile.read", deleted)
    assert [tenant.id for tenant in store.tenants()] == ["bare"]
