"""`hplm backup` and `hplm restore`: a restored state gives the answers of the saved one."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from builder.publish.export import export
from builder.publish.live import add_domain, add_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.tenants.manager import Manager
from testing.random_store import random_store, random_table, random_tenant, random_tenants
from testing.reference import Reference
from testing.toy import CONFIG, WORDS
from tests.cli.test_domain import refused, run
from tests.support.message import mentions

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path):
    store = random_store(tmp_path / "store", CONFIG, random_tenants(2, 4, 3, domains=("bio",)), ("bio",), corpus_tokens=2000)
    export(store, tmp_path / "repository", ServingOptions())
    random_table(store, "law", 1, ("bio", 1), 500, seed=3)
    live = Manager.open(tmp_path / "repository", tmp_path / "state")
    add_domain(live, store, "law")
    random_tenant(store, TenantFile("acme", 1, "law", 1, "classify", ["x", "y"], 4), 0.3, seed=1)
    add_tenant(live, store, "acme")
    return tmp_path


def answers(place, state):
    reference = Reference.open(place / "repository/toy/1", place / state)
    return torch.cat([reference.forward(" ".join(WORDS[:9]), name).flatten() for name in ("acme", "tenant-0")])


def test_a_restored_state_answers_like_the_saved_one(place, capsys):
    places = ["--repository", place / "repository", "--state"]
    before = answers(place, "state")
    assert run(capsys, "backup", "--to", place / "saved", *places, place / "state")["generation"] == 2
    live = Manager.open(place / "repository", place / "state")
    live.delete("acme")
    live.delete_domain("law")
    assert run(capsys, "restore", "--from", place / "saved", *places, place / "again")["generation"] == 2
    assert torch.equal(answers(place, "again"), before)
    assert run(capsys, "verify", *places, place / "again")["banks"] > 2
    again = Manager.open(place / "repository", place / "again")
    assert [entry["action"] for entry in again.registry.audit()] == ["domain add", "tenant add"]
    assert again.delete("acme").generation == 3


def test_tenants_can_be_changed_while_tables_are_copied(place, capsys, monkeypatch):
    places, before = ["--repository", place / "repository", "--state"], answers(place, "state")
    table, copytree, changes = place / "state/toy/plot/law/1", shutil.copytree, []
    monkeypatch.setattr("hplm.tenants.registry.PATIENCE", 0.1)

    def copied_late(source, target, **options):
        if not changes:
            live = Manager.open(place / "repository", place / "state")
            changes.extend((live.delete("acme"), live.delete_domain("law"), live.compact()))
            assert not table.exists()
        return copytree(source, target, **options)

    with monkeypatch.context() as late:
        late.setattr("shutil.copytree", copied_late)
        assert run(capsys, "backup", "--to", place / "saved", *places, place / "state")["generation"] == 2
    assert changes and not list((place / "state/toy").glob("aside-*"))
    run(capsys, "restore", "--from", place / "saved", *places, place / "again")
    assert torch.equal(answers(place, "again"), before)


def test_without_hard_links_tables_are_copied(place, capsys, monkeypatch):
    places, before = ["--repository", place / "repository", "--state"], answers(place, "state")

    def denied(*_):
        raise PermissionError(1, "no links here")

    with monkeypatch.context() as linkless:
        linkless.setattr(os, "link", denied)
        run(capsys, "backup", "--to", place / "saved", *places, place / "state")
    run(capsys, "restore", "--from", place / "saved", *places, place / "again")
    assert torch.equal(answers(place, "again"), before)


def test_a_mistyped_state_is_neither_saved_nor_created(place, capsys):
    places = ["--repository", place / "repository", "--state", place / "mistyped"]
    for command in (["backup", "--to", place / "saved"], ["tenant", "log"]):
        assert mentions(refused(capsys, *command, *places), place / "mistyped/toy")
    assert mentions(refused(capsys, "tenant", "list", *places), place / "mistyped")
    for command in (["backup", "--to", place / "saved"], ["tenant", "log"]):
        said = refused(capsys, *command, *places[:2])
        assert mentions(said, "--state") and "changes need" not in said
    assert not (place / "mistyped").exists() and not list(place.glob("saved*"))


def test_existing_backups_and_states_and_other_exports_are_refused(place, capsys, tmp_path):
    places = ["--repository", place / "repository", "--state"]
    run(capsys, "backup", "--to", place / "saved", *places, place / "state")
    said = refused(capsys, "backup", "--to", place / "saved", *places, place / "state")
    assert mentions(said, place / "saved")
    said = refused(capsys, "restore", "--from", place / "saved", *places, place / "state")
    assert mentions(said, place / "state/toy", "--state")
    said = refused(capsys, "restore", "--from", place / "store", *places, place / "other")
    assert mentions(said, place / "store", "backup.json")
    other = random_store(tmp_path / "elsewhere", CONFIG, random_tenants(3, 4, 3), corpus_tokens=500)
    export(other, tmp_path / "foreign", ServingOptions())
    strange = ["--repository", tmp_path / "foreign", "--state", place / "other"]
    assert mentions(refused(capsys, "restore", "--from", place / "saved", *strange), place / "saved")


def test_verify_of_a_broken_live_bank_names_hplm_restore(place, capsys):
    """The folder's name has characters with a meaning in a URI."""
    shutil.move(place / "state", place / "live#1?")
    places = ["--repository", place / "repository", "--state", place / "live#1?"]
    assert run(capsys, "verify", *places)["banks"] > 2
    bank = next((place / "live#1?/toy/adapters").glob("*.bank"))
    with open(bank, "r+b") as file:
        file.write(b"?")
    said = refused(capsys, "verify", *places)
    assert mentions(said, bank, "hplm restore") and "hplm export" not in said


def test_copies_without_room_are_refused_before_anything_is_copied(place, capsys, monkeypatch):
    places = ["--repository", place / "repository", "--state"]
    run(capsys, "backup", "--to", place / "saved", *places, place / "state")
    before = {path for path in place.rglob("*") if path.is_file()}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    for command in (["backup", "--to", place / "again"], ["restore", "--from", place / "saved"]):
        state = place / ("state" if command[0] == "backup" else "other")
        assert mentions(refused(capsys, *command, *places, state), "GB", "larger disk")
    assert {path for path in place.rglob("*") if path.is_file() and ".writing" not in str(path)} == before
