"""Tenants that generate text have no head, in snapshots, in banks and in changes."""

import json
from dataclasses import replace

import pytest

from builder.publish.export import write_version
from builder.store.store import TenantFile
from hplm.engine.backbone import Backbone
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.tenants.commands import Commands
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from testing.generative import GenerativeReference
from testing.random_store import random_store, random_tenant
from testing.toy import CHAT
from tests.support.message import mentioning

PLAIN = TenantFile("plain", 1, "root", 1, "generate", [], 0)
EVERY = ("query", "key", "value", "attention_out", "ffn_in", "ffn_out", "ffn_gate")
CHANGED = TenantFile("changed", 1, "law", 1, "generate", [], 4, "lora", EVERY)
PROMPT = [CHAT.start_id, 5, 6, 7, 5]


@pytest.fixture
def place(tmp_path):
    store = random_store(tmp_path / "store", CHAT, [PLAIN, CHANGED], ["law"], corpus_tokens=500, spread=0.3)
    folder = tmp_path / "repository" / "chat" / "1"
    write_version(store, store.tenants(), folder)
    return store, folder, tmp_path / "state"


def test_a_snapshot_keeps_them(place, tmp_path):
    _, folder, _ = place
    snapshot = Snapshot.load(folder / "tenants.json")
    assert snapshot.find("plain").records() == [] and snapshot.find("changed").adapter is not None
    assert snapshot.layouts == {snapshot.find("changed").adapter.layout}
    with pytest.raises(InvalidInput, match="'plain'"):
        _ = snapshot.find("plain").weights
    snapshot.save(tmp_path / "copy.json")
    assert Snapshot.load(tmp_path / "copy.json").tenants == snapshot.tenants


def test_they_are_added_updated_and_rolled_back(place):
    store, folder, state = place
    manager = Manager(folder, state)
    manager.registry.begin()
    random_tenant(store, replace(CHANGED, id="new"), 0.3, seed=7)
    manager.add("new", store.knowledge(store.tenant("new")))
    assert manager.current().find("new").head is None
    random_tenant(store, replace(CHANGED, id="new", version=2), 0.3, seed=8)
    first = GenerativeReference(Backbone(folder, state)).logits(PROMPT, "new")
    manager.update("new", store.knowledge(store.tenant("new")))
    second = GenerativeReference(Backbone(folder, state)).logits(PROMPT, "new")
    assert (first - second).abs().max() > 1e-3
    manager.compact()
    assert GenerativeReference(Backbone(folder, state)).logits(PROMPT, "new").equal(second)
    manager.roll_back("new")
    assert GenerativeReference(Backbone(folder, state)).logits(PROMPT, "new").equal(first)


def test_a_head_and_the_task_must_fit(place):
    store, folder, state = place
    manager, own = Manager(folder, state), store.knowledge(store.tenant("changed"))
    manager.registry.begin()
    with pytest.raises(InvalidInput, match=mentioning("'new'", "tag")):
        manager.add("new", replace(own, task="tag", labels=("a",)))
    with pytest.raises(InvalidInput, match=mentioning("'new'", "generate")):
        manager.add("new", replace(own, labels=("a",)))
    commands = Commands(manager, BackboneConfig.load(folder / "backbone.json"))
    asked = {"command": "tenant.add", "id": "new", "domain": "root", "domain_version": 1, "task": "tag", "labels": ["a"]}
    with pytest.raises(InvalidInput, match=mentioning("'tag'", "'chat'")):
        commands.run(json.dumps({**asked, "tensors": ""}))
