"""Tenants and domains of a store change a live state: added, updated with a canary, deleted.

Any order of changes, with rollbacks: tests/tenants/test_truth.py.
"""

import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from builder.publish.export import export
from builder.publish.live import add_domain, add_tenant, update_domain, update_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantVersion
from hplm.engine.backbone import Backbone
from hplm.errors import Broken, InvalidInput, OutOfCapacity
from hplm.plot.table import Table
from hplm.registry.folder import Folder
from hplm.registry.pointer import begin
from hplm.tenants.manager import Manager
from testing.random_store import random_backbone, random_store, random_table, random_tenant, random_tenants
from testing.toy import CONFIG, make_decoder
from tests.builder.stores import give_other_values, rows
from tests.places import answer, exported_answer, make_place
from tests.places import learn as learn_one
from tests.support.faulty_folder import FaultyFolder
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """Ten tenants of a domain, served; the store has a second version of the domain, and eight of them tuned on it."""
    folder, tenants = tmp_path_factory.mktemp("ready"), random_tenants(10, 4, 3, domains=("bio",))
    store = random_store(folder / "store", CONFIG, tenants, ("bio",), corpus_tokens=3000, spread=0.3)
    export(store, folder / "repository", ServingOptions())
    learn(store, 2, tenants[:8])
    begin(Folder(folder / "state/toy"))
    return folder


@pytest.fixture
def place(ready, tmp_path):
    shutil.copytree(ready, tmp_path, dirs_exist_ok=True)
    return Store(tmp_path / "store"), tmp_path / "repository", tmp_path / "state"


def learn(store, version, tenants):
    random_table(store, "bio", version, ("root", 1), 3000, seed=50 + version)
    for number, tenant in enumerate(tenants):
        random_tenant(store, replace(tenant, version=version, domain_version=version), 0.3, seed=90 + number)


def served(repository, state):
    return Backbone(repository / "toy/1", state)


def test_a_canary_moves_first_and_the_other_tenants_later(place, capsys):
    """One that cannot be read stays behind, and is named."""
    store, repository, state = place
    (path,) = store.tenant_folder("tenant-3", 2).glob("*.safetensors")
    path.write_text("{")
    backbone, live = served(repository, state), Manager.open(repository, state)
    first = update_domain(live, store, "bio", share=0.01)
    assert len(first.moved) == 1 and len(first.waiting) == 6 and first.behind == ["tenant-3", "tenant-8", "tenant-9"]
    assert mentions(capsys.readouterr().err, "tenant-3", path.parent)
    backbone.refresh()
    assert {tenant.id for tenant in backbone.view.snapshot.tenants if tenant.branch_id == ("bio", 2)} == set(first.moved)
    with pytest.raises(InvalidInput, match=mentioning("'bio'", 1, 0.01, 6, "--canary")):
        update_domain(live, store, "bio", share=0.01)
    second = update_domain(live, store, "bio", share=0.6)
    assert len(second.moved) == 3 and not set(second.moved) & set(first.moved)
    rest = update_domain(live, store, "bio")
    assert sorted(rest.moved + second.moved + first.moved) == [f"tenant-{i}" for i in range(8) if i != 3]
    with pytest.raises(InvalidInput, match=mentioning("'bio'", 2, "tenant-8", "tenant-9", "hplm build tenant")):
        update_domain(live, store, "bio")


def test_a_new_version_of_a_decoders_table_brings_its_own_lower_layers(tmp_path):
    law = TenantVersion("law", 1, "law", 1, "generate", [], 0)
    store = make_decoder(tmp_path / "store", [law], ["law"])
    export(store, tmp_path / "repository", ServingOptions())
    begin(Folder(tmp_path / "state/chat"))
    backbone = Backbone(tmp_path / "repository/chat/1", tmp_path / "state")
    store.save_lower("law", 2, random_backbone(store.config, 9)[0])
    random_table(store, "law", 2, ("root", 1), 500, seed=9)
    random_tenant(store, replace(law, version=2, domain_version=2), 0.3, seed=9)
    update_domain(Manager.open(tmp_path / "repository", tmp_path / "state", "chat"), store, "law")
    backbone.refresh()
    for version in (1, 2):
        own = backbone.lower(backbone.view.forest.chain("law", version).domain)
        assert torch.equal(own.layers[0].qkv.weight, store.lower("law", version).layers[0].qkv.weight)


def test_tables_that_no_tenant_needs_are_removed_and_addresses_are_never_used_twice(place):
    store, repository, state = place
    live, bases = Manager.open(repository, state), {}
    for version in (2, 3, 4, 5):
        if version > 2:
            learn(store, version, store.tenants())
        removed = update_domain(live, store, "bio").removed
        assert removed == {4: ["bio/1", "bio/2"], 5: ["bio/3"]}.get(version, [])  # a rollback from 3 may still need 2 and 1
        backbone = served(repository, state)
        assert not backbone.view.forest.failures()
        for branch in backbone.view.snapshot.branches:
            assert bases.setdefault((branch.domain, branch.version), branch.base) == branch.base
    resting = {name for name, _ in live.current().ledger.resting}  # requests in flight may still need them
    kept = {path.name for path in live.state.tables.glob("bio/*") if f"plot/bio/{path.name}/" not in resting}
    assert {name.partition("-")[0] for name in kept} == {"4", "5"}
    assert (repository / "toy/1/plot/bio/1").is_dir()  # exported tables are never removed
    spans = sorted((base, base + store.table(*branch).size) for branch, base in bases.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_domain_is_added_with_its_ancestors_and_deleted_when_nobody_uses_it(place):
    store, repository, state = place
    random_table(store, "law", 1, ("bio", 2), 2000, seed=7)
    live = Manager.open(repository, state)
    add_domain(live, store, "law")
    backbone = served(repository, state)
    assert [table.meta.domain for table, _ in backbone.view.forest.chain("law", 1).links] == ["law", "bio", "root"]
    for wrong, named in (
        (lambda: add_domain(live, store, "law"), ["'law'", "hplm domain update"]),
        (lambda: live.delete_domain("bio"), ["'bio'", "law", "tenant-0", 6]),
        (lambda: live.delete_domain("root"), ["root"]),
    ):
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            wrong()
    live.delete_domain("law")
    ((gone, _),) = live.current().ledger.resting  # of law alone: bio is served on
    assert gone.startswith("plot/law/1-")


def test_tables_of_which_one_cannot_be_written_leave_nothing_behind(place):
    store, repository, state = place
    random_table(store, "law", 1, ("bio", 2), 2000, seed=7)
    live = Manager.open(repository, state)

    def full(name):
        if name.startswith("plot/bio") and name.endswith("values"):
            raise OutOfCapacity(name)

    live.registry.store = FaultyFolder(state / "toy", full)
    with pytest.raises(OutOfCapacity, match="plot/bio"):
        add_domain(live, store, "law")
    assert not (state / "toy/plot").exists()


def test_another_store_and_another_table_of_a_served_version_are_refused(place, tmp_path):
    store, repository, state = place
    live = Manager.open(repository, state)
    other = random_store(tmp_path / "other", CONFIG, random_tenants(2, 4, 3), ("bio",), corpus_tokens=500, seed=9)
    with pytest.raises(InvalidInput, match=mentioning(other.folder)):
        update_domain(live, other, "bio")
    update_domain(live, store, "bio", share=0.25)
    give_other_values(store, "bio", 2)  # as another adaptation of the lower layers does
    for bring in (lambda: update_domain(live, store, "bio"), lambda: update_tenant(live, store, "tenant-7")):
        with pytest.raises(InvalidInput, match=mentioning("'bio'", 2, store.folder)):
            bring()
    for tenant in live.current().tenants:
        live.delete(tenant.id)
    live.delete_domain("bio")
    store.remove_branch("bio", 2)
    give_other_values(store, "bio", 1)
    add_domain(live, store, "bio")  # beside the exported one, which nobody reads any more
    (table,) = [table for table in served(repository, state).view.forest.tables() if table.meta.domain == "bio"]
    exported = repository / "toy/1/plot/bio/1"
    assert rows(table) == rows(store.table("bio", 1)) != rows(Table(exported))


def test_a_state_of_another_export_is_refused(place):
    store, repository, state = place
    update_domain(Manager.open(repository, state), store, "bio")
    export(store, repository, ServingOptions(), replace=True)
    with pytest.raises(Broken, match=mentioning(state / "toy")):
        served(repository, state)
    with pytest.raises(InvalidInput, match=mentioning(state / "toy")):
        update_domain(Manager.open(repository, state), store, "bio")


def test_a_tenant_is_added_and_updated_as_an_export_has_it_and_others_are_refused(tmp_path):
    """The order of versions is in tests/tenants/test_truth.py."""
    place = store, repository, state = make_place(tmp_path)
    live = Manager.open(repository, state)
    for version, change in ((5, add_tenant), (7, update_tenant)):
        learn_one(store, "new-c", version, seed=version)
        assert change(live, store, "new-c").after == version  # the store's
    assert (answer(place, "new-c") == exported_answer(place, "new-c")).all()
    known = store.tenant("tenant-0")
    assert known is not None
    random_tenant(store, replace(known, version=3, labels=[*known.labels, "new"]), 0.3, seed=1)
    assert update_tenant(live, store, "tenant-0").after == 3 and live.current().find("tenant-0").labels[-1] == "new"
    assert len(answer(place, "tenant-0")[0]) == len(known.labels) + 1
    random_tenant(store, replace(known, version=4), 0.3, seed=1)
    with pytest.raises(InvalidInput, match=mentioning("'tenant-0'", len(known.labels) + 1, "labels", "hplm tenant rollback")):
        update_tenant(live, store, "tenant-0")
    assert live.roll_back("tenant-0").after == known.version and live.current().find("tenant-0").labels == tuple(known.labels)
    random_tenant(store, TenantVersion("tenant-0", 5, "root", 1, "classify", ["other"], 4), 0.3, seed=1)
    random_tenant(store, TenantVersion("lost", 1, "law", 7, "classify", ["x"], 4), 0.3, seed=1)
    for change, name, named in (
        (update_tenant, "tenant-0", ["classify"]),
        (add_tenant, "lost", [7, "'law'"]),
        (add_tenant, "nobody", [store.folder, "new-a"]),
    ):
        with pytest.raises(InvalidInput, match=mentioning(repr(name), *named)):
            change(live, store, name)
