"""A copy is changed at its source alone."""

import json

import pytest

from hplm.cli.main import main
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.tenants.commands import Commands
from hplm.tenants.manager import Manager
from tests.follow.faulty import faulty
from tests.follow.machine import Machine
from tests.places import knowledge, make_place
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path)


@pytest.fixture
def machine(place, tmp_path):
    store, repository, state = place
    Manager.open(repository, state).add("new-a", knowledge(store, "new-a"))
    with faulty(state) as source:
        machine = Machine(repository, tmp_path / "copy", source.url)
        machine.follow()
    return machine


CHANGES = {
    "add": lambda live, store: live.add("new-b", knowledge(store, "new-b")),
    "update": lambda live, store: live.update("new-a", knowledge(store, "new-a")),
    "rollback": lambda live, store: live.roll_back("new-a"),
    "delete": lambda live, store: live.delete("new-a"),
    "key": lambda live, store: live.add_key("new-a"),
    "limit": lambda live, store: live.limit("new-a", rate=1.0),
    "compact": lambda live, store: live.compact(),
    "domain": lambda live, store: live.delete_domain("law"),
    "log": lambda live, store: live.registry.audit(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_refused_with_the_address_of_the_source(place, machine, change):
    live = Manager.open(place[1], machine.root)
    with pytest.raises(InvalidInput, match=mentioning(machine.url)):
        change(live, place[0])
    assert not machine.state.registry.exists() and live.current().find("new-a")


def test_the_admin_model_refuses_them_too_and_lists(place, machine):
    commands = Commands(Manager.open(place[1], machine.root), BackboneConfig.load(machine.folder / "backbone.json"))
    with pytest.raises(InvalidInput, match=mentioning(machine.url)):
        commands.run('{"command": "tenant.delete", "id": "new-a"}')
    listed = json.loads(commands.run('{"command": "tenant.list"}'))["tenants"]
    assert {tenant["id"] for tenant in listed} == {"tenant-0", "tenant-1", "new-a"}
    assert json.loads(commands.run('{"command": "tenant.show", "id": "new-a"}'))["version"] == 1


def test_commands_list_and_verify_a_copy_and_refuse_to_change_it(place, machine, capsys):
    places = ["--repository", str(place[1]), "--state", str(machine.root)]
    assert main(["tenant", "list", *places]) == 0 and mentions(capsys.readouterr().out, "new-a")
    assert main(["tenant", "show", "new-a", *places]) == 0
    assert main(["verify", *places]) == 0
    capsys.readouterr()
    for command in (
        ["tenant", "limit", "new-a", "--rate", "1"],
        ["tenant", "log"],
        ["backup", "--to", str(machine.root / "x")],
    ):
        assert main([*command, *places]) == 1
        assert mentions(capsys.readouterr().err, machine.url)
