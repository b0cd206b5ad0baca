"""Newer code serves the files that releases have written, changes them, and goes on with them.

Where a format has changed, the test of that release expects a refusal with the command that renews, in place of these.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from builder.publish.export import export
from builder.publish.live import Trained
from builder.store.seen import SeenTexts
from builder.store.store import Store
from builder.store.verification import store_parts
from hplm.tenants.backup import restore
from hplm.tenants.manager import Manager
from hplm.tenants.verification import repository_parts
from testing.random_store import random_tenant
from tests.fixtures import RELEASES, unpack
from tests.server.stock import refused
from tests.support.answers import Comparison
from tests.support.configurations import ENCODER

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("archive", [pytest.param(one, marks=pytest.mark.server(one.name), id=one.name) for one in RELEASES])
def test_its_export_is_served_with_its_registry_which_goes_on(server, archive):
    told, stock, compared = json.loads((server.folder / "answers.json").read_text()), server.stock(), Comparison()
    headers = {"authorization": f"Bearer {told['secret']}"}
    for tenant, logits in told["tenants"].items():
        for text, expected in zip(told["texts"], logits, strict=True):
            compared.add(tenant, stock.ask([text], tenant, headers=headers)["LOGITS"][0], np.array(expected, np.float32))
    compared.assert_equal("fp32")
    with refused("no_tenant"):
        stock.ask(told["texts"][:1], "head")
    manager = server.manager()
    before = manager.current()
    assert before.find("many").rate == 1000 and before.generation == 3
    manager.delete("added")
    assert manager.settle() == []
    with refused("no_tenant"):
        stock.ask(told["texts"][:1], "added")
    restore(server.folder / "backup", manager.registry, accept_old_keys=True)  # of `added`, which was deleted
    assert manager.settle() == [] and stock.ask(told["texts"][:1], "added")["LABEL"].size


@pytest.mark.parametrize("archive", RELEASES, ids=lambda one: one.name)
def test_its_store_exports_the_same_and_goes_on(tmp_path, archive):
    unpack(archive, tmp_path)
    store, live = Store(tmp_path / "store"), Manager.open(tmp_path / "repository", tmp_path / "state")
    for part in (*store_parts(store.folder), *repository_parts(tmp_path / "repository", tmp_path / "state")):
        assert not list(part.check(part.path, lambda _: None)), part.path
    assert not export(store, tmp_path / "repository", replace(ENCODER, slots=2)).is_new
    assert store.seen(store.tenant("plain")) == SeenTexts(frozenset({1, 2**64 - 1}), frozenset({3}))
    before, ids = live.current(), store.tenant_ids()
    assert [one.after for one in Trained(live, store, ids).publish_all().tenants] == [1] * len(ids)
    assert live.current().generation == before.generation, "the same content is published again"
    random_tenant(store, replace(store.known_tenant("plain"), version=2), 0.3, seed=1)
    assert [one.after for one in Trained(live, store, ["plain"]).publish_all().tenants] == [2]
