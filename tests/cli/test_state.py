"""`hplm begin`, `hplm backup` and `hplm restore`: a restored state gives the answers of the saved one."""

import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from builder.publish.export import export
from builder.publish.live import add_domain, add_tenant
from builder.publish.model_configs import ServingOptions
from hplm.cli.main import main
from hplm.errors import InvalidInput
from hplm.tenants.manager import Manager
from hplm.tenants.state import State
from testing.random_store import random_store, random_tenants
from testing.reference import Reference
from testing.toy import CONFIG, WORDS
from tests.cli.commands import refused, run
from tests.support.message import mentions

pytestmark = pytest.mark.slow


@pytest.fixture
def absent(live):
    """The options of a repository without a state."""
    shutil.rmtree(live.folder / "state")
    return live, [*live][1]


def test_only_a_begun_state_takes_changes(absent, capsys):
    live, places = absent
    (store, _), state = live, live.folder / "state"
    commands = [
        *(["tenant", action, "tenant-0"] for action in ("rollback", "delete")),
        ["tenant", "compact"],
        ["tenant", "key", "add", "tenant-0"],
        ["tenant", "key", "revoke", "tenant-0", "--key", "x"],
        ["tenant", "limit", "tenant-0", "--rate", 5],
        *(["tenant", action, "tenant-0", *store] for action in ("add", "update")),
        *(["domain", action, "--name", "bio", *store] for action in ("add", "update")),
        *(["domain", action, "--name", "bio"] for action in ("rollback", "delete")),
        *(["tenant", "log"], ["backup", "--to", live.folder / "saved"]),
    ]
    for command in commands:
        assert mentions(refused(capsys, *command, *places), state / "toy"), command
        assert mentions(refused(capsys, *command, *places[:2]), "--state"), command
    assert not state.exists() and not list(live.folder.glob("saved*"))
    assert mentions(refused(capsys, "tenant", "list", *places), state)
    assert run(capsys, "begin", *places) == {"begun": ["toy"]}
    assert run(capsys, "tenant", "log", *places) == {"changes": []}
    assert run(capsys, "backup", "--to", live.folder / "saved", *places)["generation"] == 0
    run(capsys, "restore", "--from", live.folder / "saved", *places[:3], live.folder / "again")
    assert (live.folder / "again/toy/CURRENT").read_text() == "0\n"
    assert run(capsys, "tenant", "key", "add", "tenant-0", *places)["secret"]
    assert mentions(refused(capsys, "begin", *places), state, "toy")
    assert State(state / "toy").current() == 1


def test_a_state_that_has_lost_current_is_not_begun_again(absent, capsys):
    live, places = absent
    manager, folder = live.manager, live.folder / "state/toy"
    manager.add_key("tenant-0")
    manager.state.current_file.unlink()
    assert mentions(refused(capsys, "begin", *places), folder, "CURRENT")
    run(capsys, "tenant", "compact", *places)  # the registry knows it
    assert manager.state.current() == 2 and manager.current().find("tenant-0").keys
    manager.state.current_file.unlink()
    shutil.rmtree(manager.state.snapshots)  # the registry alone still knows of the key
    for command in (["begin"], ["tenant", "compact"]):
        assert mentions(refused(capsys, *command, *places), folder, "CURRENT")
    assert not manager.state.current_file.exists()


def test_a_registry_without_changes_does_not_keep_a_state_from_its_beginning(absent, capsys):
    live, places = absent
    with pytest.raises(InvalidInput, match="'nobody'"):
        live.manager.delete("nobody")
    assert live.manager.state.registry.exists() and not live.manager.state.current_file.exists()
    assert run(capsys, "begin", *places) == {"begun": ["toy"]}


def test_of_several_backbones_with_a_tenant_one_has_to_be_named(live, capsys, tmp_path):
    repository = live.folder / "repository"
    other = random_store(tmp_path / "other", replace(CONFIG, name="other"), random_tenants(1, 4, 2))
    export(other, repository, ServingOptions())
    for command in (["tenant", "show", "tenant-0"], ["tenant", "key", "list", "tenant-0"]):
        said = refused(capsys, *command, "--repository", repository)
        assert mentions(said, "'tenant-0'", "toy", "other", "--backbone"), command
    shown = run(capsys, "tenant", "show", "tenant-0", "--repository", repository, "--backbone", "other")
    assert shown["backbone"] == "other"


@pytest.fixture
def changed(live):
    """The options of the repository, and of the state, in which law and acme were added."""
    add_domain(live.manager, live.store, "law")
    add_tenant(live.manager, live.store, "acme")
    return live.folder, [*live][1]


def answers(folder, state):
    reference = Reference.open(folder / "repository/toy/1", folder / state)
    return torch.cat([reference.forward(" ".join(WORDS[:9]), name).flatten() for name in ("acme", "tenant-0")])


def test_a_restored_state_answers_like_the_saved_one(changed, capsys):
    folder, places = changed
    before = answers(folder, "state")
    assert run(capsys, "backup", "--to", folder / "saved", *places)["generation"] == 2
    live = Manager.open(folder / "repository", folder / "state")
    live.delete("acme")
    live.delete_domain("law")
    again = [*places[:3], folder / "again"]
    assert run(capsys, "restore", "--from", folder / "saved", *again)["generation"] == 2
    assert torch.equal(answers(folder, "again"), before)
    assert run(capsys, "verify", *again)["banks"] > 2
    live = Manager.open(folder / "repository", folder / "again")
    assert [entry["action"] for entry in live.registry.audit()] == ["domain add", "tenant add"]
    assert live.delete("acme").generation == 3


@pytest.mark.parametrize("linkless", [False, True])
def test_tenants_can_be_changed_while_tables_are_copied(changed, capsys, monkeypatch, linkless):
    (folder, places), before = changed, answers(changed[0], "state")
    table, copytree, changes = folder / "state/toy/plot/law/1", shutil.copytree, []
    monkeypatch.setattr("hplm.tenants.registry.PATIENCE", 0.1)

    def denied(*_):
        raise PermissionError(1, "no links here")

    def copied_late(source, target, **options):
        if not changes:
            live = Manager.open(folder / "repository", folder / "state")
            changes.extend((live.delete("acme"), live.delete_domain("law"), live.compact()))
            assert not table.exists()
        return copytree(source, target, **options)

    with monkeypatch.context() as late:
        late.setattr("shutil.copytree", copytree if linkless else copied_late)
        late.setattr(os, "link", denied if linkless else os.link)
        assert run(capsys, "backup", "--to", folder / "saved", *places)["generation"] == 2
    assert bool(changes) != linkless and not list((folder / "state/toy").glob("aside-*"))
    run(capsys, "restore", "--from", folder / "saved", *places[:3], folder / "again")
    assert torch.equal(answers(folder, "again"), before)


def test_existing_backups_and_states_other_exports_and_small_disks_are_refused(changed, capsys, tmp_path, monkeypatch):
    folder, places = changed
    saved, other = folder / "saved", [*places[:3], folder / "other"]
    run(capsys, "backup", "--to", saved, *places)
    assert mentions(refused(capsys, "backup", "--to", saved, *places), saved)
    assert mentions(refused(capsys, "restore", "--from", saved, *places), folder / "state/toy", "--state")
    assert mentions(refused(capsys, "restore", "--from", folder / "store", *other), folder / "store", "backup.json")
    strange = random_store(tmp_path / "elsewhere", CONFIG, random_tenants(3, 4, 3), corpus_tokens=500)
    export(strange, tmp_path / "foreign", ServingOptions())
    assert mentions(refused(capsys, "restore", "--from", saved, "--repository", tmp_path / "foreign", *other[2:]), saved)
    before = {path for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    for command in (["backup", "--to", folder / "again", *places], ["restore", "--from", saved, *other]):
        assert mentions(refused(capsys, *command), "GB", "larger disk")
    assert {path for path in folder.rglob("*") if path.is_file() and ".writing" not in str(path)} == before


def test_an_error_of_the_system_is_one_line(live, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    places = [*map(str, [*live][1][:3]), str(tmp_path / "file")]
    assert main(["restore", "--from", str(tmp_path / "file"), *places]) == 1
    assert capsys.readouterr().err == f"hplm restore: Not a directory: {tmp_path}/file/backup.json\n"
    assert mentions(refused(capsys, "begin", *places), tmp_path / "file/toy", "Not a directory")
