"""`hplm begin`, and changes of a state that nobody has begun."""

import shutil
from dataclasses import replace

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import InvalidInput
from hplm.tenants.manager import Manager
from hplm.tenants.state import State
from testing.random_store import random_store, random_tenants
from testing.toy import CONFIG
from tests.cli.test_domain import refused, run
from tests.support.message import mentions


@pytest.fixture
def places(tmp_path):
    export(random_store(tmp_path / "store", CONFIG, random_tenants(1, 4, 2)), tmp_path / "repository", ServingOptions())
    return ["--repository", tmp_path / "repository", "--state", tmp_path / "state"]


def test_only_a_begun_state_takes_changes(places, capsys, tmp_path):
    commands = [
        *(["tenant", action, "tenant-0"] for action in ("rollback", "delete")),
        ["tenant", "key", "add", "tenant-0"],
        ["tenant", "key", "revoke", "tenant-0", "--key", "x"],
        ["tenant", "limit", "tenant-0", "--rate", 5],
        ["tenant", "compact"],
        *(["tenant", action, "tenant-0", "--store", tmp_path / "store"] for action in ("add", "update")),
        *(["domain", action, "--name", "root", "--store", tmp_path / "store"] for action in ("add", "update")),
        *(["domain", action, "--name", "root"] for action in ("rollback", "delete")),
    ]
    for command in commands:
        assert mentions(refused(capsys, *command, *places), tmp_path / "state/toy", "CURRENT", "hplm begin"), command
    assert not (tmp_path / "state").exists()
    assert run(capsys, "begin", *places) == {"begun": ["toy"]}
    assert run(capsys, "tenant", "log", *places) == {"changes": []}
    assert run(capsys, "tenant", "key", "add", "tenant-0", *places)["secret"]
    assert mentions(refused(capsys, "begin", *places), tmp_path / "state", "toy")
    assert State(tmp_path / "state/toy").current() == 1


def test_a_state_that_has_lost_current_is_not_begun_again(places, capsys, tmp_path):
    live = Manager.open(tmp_path / "repository", tmp_path / "state")
    live.add_key("tenant-0")
    live.state.current_file.unlink()
    assert mentions(refused(capsys, "begin", *places), tmp_path / "state/toy", "CURRENT")
    run(capsys, "tenant", "compact", *places)  # the registry knows it
    assert live.state.current() == 2 and live.current().find("tenant-0").keys
    live.state.current_file.unlink()
    shutil.rmtree(live.state.snapshots)  # the registry alone still knows of the key
    for command in (["begin"], ["tenant", "compact"]):
        assert mentions(refused(capsys, *command, *places), tmp_path / "state/toy", "CURRENT")
    assert not live.state.current_file.exists()


def test_a_registry_without_changes_does_not_keep_a_state_from_its_beginning(places, capsys, tmp_path):
    live = Manager.open(tmp_path / "repository", tmp_path / "state")
    with pytest.raises(InvalidInput, match="'nobody'"):
        live.delete("nobody")
    assert live.state.registry.exists() and not live.state.current_file.exists()
    assert run(capsys, "begin", *places) == {"begun": ["toy"]}


def test_a_repository_without_backbones_has_no_state(places, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert mentions(refused(capsys, "begin", "--repository", tmp_path / "empty", *places[2:]), tmp_path / "empty")
    assert mentions(refused(capsys, "begin", *places, "--backbone", "other"), "other")


def test_a_state_without_changes_is_saved_and_restored(places, capsys, tmp_path):
    run(capsys, "begin", *places)
    assert run(capsys, "backup", "--to", tmp_path / "saved", *places)["generation"] == 0
    run(capsys, "restore", "--from", tmp_path / "saved", *places[:3], tmp_path / "again")
    assert (tmp_path / "again/toy/CURRENT").read_text() == "0\n"


def test_of_several_backbones_with_a_tenant_one_has_to_be_named(places, capsys, tmp_path):
    tenants = random_tenants(1, 4, 2)
    export(random_store(tmp_path / "other", replace(CONFIG, name="other"), tenants), tmp_path / "repository", ServingOptions())
    for command in (["tenant", "show", "tenant-0"], ["tenant", "key", "list", "tenant-0"]):
        assert mentions(refused(capsys, *command, *places[:2]), "'tenant-0'", "toy", "other", "--backbone"), command
    assert run(capsys, "tenant", "show", "tenant-0", *places[:2], "--backbone", "other")["backbone"] == "other"
