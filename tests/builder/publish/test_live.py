"""Domains of a live state: added, updated with a canary, rolled back, deleted."""

import json
import shutil
from itertools import pairwise

import pytest

from builder.publish.export import export
from builder.publish.live import add_domain, check_stacks, update_domain, update_tenant
from builder.publish.model_configs import ServingOptions
from hplm.errors import Broken, InvalidInput, NoTenant
from hplm.plot.writing import write_table
from hplm.tenants.manager import Manager
from testing.random_store import (
    random_documents,
    random_stack,
    random_store,
    random_table,
    random_tenants,
    random_values,
    ranked_keys,
)
from testing.reference import Reference
from testing.toy import CONFIG, WORDS
from tests.builder.publish.live_domains import learn, served, versions
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

TEXT = " ".join(WORDS[:20])


def write_other_values(store, domain, version):
    """Writes other values for the same n-grams, as another adaptation of the lower layers would."""
    spec = store.table_spec(domain, version, ("root", 1), "fp16", 3000)
    keys = ranked_keys(random_documents(CONFIG, 3000, 64, 50 + version), spec.space, root=False)
    write_table(store.table_folder(domain, version), spec, keys, random_values(spec, 1234))


def test_a_stack_must_be_the_exported_one(place):
    store, repository, state = place
    random_stack(store, "small", 1, seed=1)
    with pytest.raises(InvalidInput, match=mentioning("'small'", repository, "export")):
        check_stacks(Manager.open(repository, state), store, ["small"])
    export(store, repository, ServingOptions())
    live = Manager.open(repository, state)
    check_stacks(live, store, ["small"])
    check_stacks(live, store, [])
    random_stack(store, "small", 1, seed=2)
    with pytest.raises(InvalidInput, match=mentioning("'small'", repository, "export")):
        check_stacks(live, store, ["small"])


def test_a_canary_moves_first_and_the_other_tenants_later(place):
    store, repository, state = place
    backbone = served(repository, state)
    live = Manager.open(repository, state)
    first = update_domain(live, store, "bio", share=0.25)
    assert len(first.moved) == 2 and len(first.waiting) == 6 and first.behind == ["tenant-8", "tenant-9"]
    assert (first.generation, first.version) == (1, 2)
    assert backbone.view.snapshot.generation == 0
    backbone.refresh()
    assert {name for name, version in versions(backbone).items() if version == (2, 2)} == set(first.moved)
    second = update_domain(live, store, "bio", share=0.5)
    assert len(second.moved) == 2 and not set(second.moved) & set(first.moved)
    rest = update_domain(live, store, "bio")
    assert sorted(rest.moved + second.moved + first.moved) == [f"tenant-{i}" for i in range(8)]
    with pytest.raises(InvalidInput, match=mentioning("'bio'", 2, "tenant-8", "tenant-9", "hplm build tenant")):
        update_domain(live, store, "bio")
    backbone.refresh()
    assert versions(backbone) == {f"tenant-{i}": (2, 2) if i < 8 else (1, 1) for i in range(10)}


def test_a_tiny_canary_moves_one_tenant_and_the_same_command_again_is_refused(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    first = update_domain(live, store, "bio", share=0.01)
    assert len(first.moved) == 1 and len(first.waiting) == 7
    with pytest.raises(InvalidInput, match=mentioning("'bio'", 1, 0.01, 7, "--canary")):
        update_domain(live, store, "bio", share=0.01)
    assert len(update_domain(live, store, "bio").moved) == 7


def test_answers_are_those_of_the_tenants_version(place):
    store, repository, state = place
    before = Reference.open(repository / "toy/1").forward(TEXT, "tenant-0")
    update_domain(Manager.open(repository, state), store, "bio")
    export(store, repository.with_name("fresh"), ServingOptions())
    fresh = Reference.open(repository.with_name("fresh") / "toy/1").forward(TEXT, "tenant-0")
    after = Reference.open(repository / "toy/1", state).forward(TEXT, "tenant-0")
    assert (after == fresh).all() and (after != before).any()
    stayed = [Reference.open(repository / "toy/1", place).forward(TEXT, "tenant-9") for place in (None, state)]
    assert (stayed[0] == stayed[1]).all()
    Manager.open(repository, state).roll_back_domain("bio")
    assert (Reference.open(repository / "toy/1", state).forward(TEXT, "tenant-0") == before).all()


def test_a_rollback_moves_back_the_tenants_that_had_moved(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    moved = update_domain(live, store, "bio", share=0.5).moved
    back = live.roll_back_domain("bio")
    assert back.moved == moved and back.version == 1
    assert set(versions(served(repository, state)).values()) == {(1, 1)}
    with pytest.raises(InvalidInput, match="'bio'"):
        live.roll_back_domain("bio")
    assert update_domain(live, store, "bio").moved == [f"tenant-{i}" for i in range(8)]


def test_tables_and_banks_that_no_tenant_needs_are_removed(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    update_domain(live, store, "bio")
    for version, tenants in ((3, store.tenants()), (4, store.tenants())):
        learn(store, version, tenants)
        removed = update_domain(live, store, "bio").removed
        assert removed == ([] if version == 3 else ["bio/1", "bio/2"])  # a rollback from 3 may still need 2 and 1
    assert sorted(path.name for path in live.state.tables.glob("bio/*")) == ["3", "4"]
    backbone = served(repository, state)
    assert not backbone.view.forest.failures()
    assert (repository / "toy/1/plot/bio/1").is_dir()  # exported tables are never removed


def test_addresses_are_never_used_twice(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    bases = {}
    for version in (2, 3, 4, 5):
        if version > 2:
            learn(store, version, store.tenants())
        update_domain(live, store, "bio")
        for branch in served(repository, state).view.snapshot.branches:
            assert bases.setdefault((branch.domain, branch.version), branch.base) == branch.base
    spans = sorted((base, base + store.table(*branch).size) for branch, base in bases.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_domain_is_added_with_its_ancestors_and_deleted_when_nobody_uses_it(place):
    store, repository, state = place
    random_table(store, "law", 1, ("bio", 2), 2000, seed=7)
    live = Manager.open(repository, state)
    add_domain(live, store, "law")
    backbone = served(repository, state)
    assert [table.meta.domain for table, _ in backbone.view.forest.chain("law", 1).links] == ["law", "bio", "root"]
    with pytest.raises(InvalidInput, match=mentioning("'law'", "hplm domain update")):
        add_domain(live, store, "law")
    with pytest.raises(InvalidInput, match=mentioning("'bio'", "law", "tenant-0", 6)):
        live.delete_domain("bio")
    with pytest.raises(InvalidInput, match=mentioning("root")):
        live.delete_domain("root")
    live.delete_domain("law")
    assert not (live.state.tables / "law").is_dir() or not list((live.state.tables / "law").iterdir())
    with pytest.raises(InvalidInput, match=mentioning("'law'", "bio", "root")):
        live.delete_domain("law")


def test_another_store_and_another_export_are_refused(place, tmp_path):
    store, repository, state = place
    other = random_store(tmp_path / "other", CONFIG, random_tenants(2, 4, 3), ("bio",), corpus_tokens=500, seed=9)
    with pytest.raises(InvalidInput, match=mentioning(other.folder)):
        update_domain(Manager.open(repository, state), other, "bio")
    update_domain(Manager.open(repository, state), store, "bio")
    export(store, repository, ServingOptions())
    with pytest.raises(Broken, match=mentioning(state / "toy")):
        served(repository, state)
    with pytest.raises(Broken, match=mentioning(state / "toy")):
        update_domain(Manager.open(repository, state), store, "bio")


def test_another_table_of_the_same_version_is_refused(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    update_domain(live, store, "bio", share=0.25)
    store.remove_branch("bio", 2)
    write_other_values(store, "bio", 2)
    for bring in (lambda: update_domain(live, store, "bio"), lambda: update_tenant(live, store, "tenant-7")):
        with pytest.raises(InvalidInput, match=mentioning("'bio'", 2, store.folder)):
            bring()


def test_an_exported_version_is_never_given_to_another_table(place, tmp_path):
    store, repository, state = place
    live = Manager.open(repository, state)
    for tenant in live.current().tenants:
        live.delete(tenant.id)
    live.delete_domain("bio")
    own = shutil.copytree(store.table_folder("bio", 1), tmp_path / "own")
    for version in (1, 2):
        store.remove_branch("bio", version)
    random_table(store, "bio", 1, ("root", 1), 2000, seed=1234)
    for bring in (lambda: add_domain(live, store, "bio"), lambda: live.adopt_domain("bio", 1, store.table_folder("bio", 1))):
        with pytest.raises(InvalidInput, match=mentioning("'bio'", 1)):
            bring()
    assert live.adopt_domain("bio", 1, own).version == 1  # the same table may be added again


def test_every_change_is_in_the_audit_log(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    update_domain(live, store, "bio", share=0.25)
    live.roll_back_domain("bio")
    log = live.registry.audit()
    assert [(entry["generation"], entry["action"], entry["version"]) for entry in log] == [
        (1, "domain update", 2),
        (2, "domain rollback", 1),
    ]
    assert log[0]["who"] and log[0]["at"] and log[0]["moved"] == log[1]["moved"]


def test_a_state_that_cannot_be_read_is_named(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    update_domain(live, store, "bio")
    backbone = served(repository, state)
    live.state.current_file.write_text("seven")
    with pytest.raises(Broken, match=mentioning(live.state.current_file)):
        backbone.refresh()
    assert backbone.view.snapshot.generation == 1  # served tenants stay
    live.state.current_file.write_text("1")
    snapshot = live.state.snapshots / "1"
    snapshot.write_text(json.dumps({**json.loads(snapshot.read_text()), "format": 99}))
    with pytest.raises(InvalidInput, match=mentioning(snapshot, 99)):
        served(repository, state)
    with pytest.raises(NoTenant):
        backbone.view.snapshot.find("nobody")
