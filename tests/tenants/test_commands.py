"""Remote commands are checked like those of the command line. tests/server/test_live_changes.py tests a real server."""

import base64
import json

import pytest

from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.tenants.commands import Commands
from hplm.tenants.manager import Manager
from tests.places import command, sent
from tests.support.message import refusing
from tests.tenants.truth import expect_same, learned, seen


@pytest.fixture(scope="module")
def place(export, tmp_path_factory):
    """A manager and its remote commands. What is refused changes nothing: all tests have one state."""
    manager = Manager.open(export.repository, tmp_path_factory.mktemp("state"))
    manager.registry.begin()
    return manager, Commands(manager, BackboneConfig.load(manager.folder / "backbone.json"))


GIVEN, TENSORS = command("acme", learned(3))


def strange_type():
    """A safetensors file with a type that torch does not have."""
    header = json.dumps({"head.weight": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    return base64.b64encode(len(header).to_bytes(8, "little") + header + b"1").decode()


ONE_LESS = {**GIVEN["exits"], "calibrations": GIVEN["exits"]["calibrations"][:1]}
HUGE = sent({name: 1e6 * tensor for name, tensor in TENSORS.items()})
LACKING = sent({name: tensor for name, tensor in TENSORS.items() if name != "exits.1.bias"})


@pytest.mark.parametrize(
    "wrong, named",
    [
        *(({"calibration": given}, ["'calibration'"]) for given in (3, {"kind": "temperature"}, {"temperature": -1})),
        *(({"tensors": given}, ["'tensors'"]) for given in ("\u00e9", "\ud800", strange_type(), [1])),
        *(({"domain_version": given}, ["'domain_version'"]) for given in (1.0, True, [1], 0)),
        *(({"exits": given}, ["exits"]) for given in (3, {}, ONE_LESS)),
        ({"tensors": LACKING}, ["exits.1.bias"]),
        ({"labels": ["\ud800", "y", "z"]}, ["'acme'", "UTF-8"]),
        ({"labels": ["x", "x", "z"]}, ["'acme'", "'x'"]),
        ({"labels": [1, 2, 3]}, ["labels"]),
        ({"task": "generate"}, ["'generate'", "'toy'"]),
        ({"adapter": {"kind": "bottleneck", "rank": True}}, ["'adapter.rank'"]),
        *(({"adapter": {"rank": 4, **part}}, []) for part in ({"kind": 1}, {"places": 3}, {"places": [4]}, {"function": {}})),
        *(({"command": ["tenant.add"]}, []), ({"id": 7}, []), ({"task": ["classify"]}, []), ({"head_function": 3}, [])),
        ({"tensors": HUGE}, ["fp16"]),
        ({"labels": []}, ["'labels'"]),
        ({"domain": "med"}, ["'med'"]),
        ({"adapter": {**GIVEN["adapter"], "rank": 5}}, ["'adapter.0.query/a'"]),
        ({"adapter": {"kind": "magic", "rank": 4}}, ["'magic'"]),
        ({"command": "tenant.explode"}, ["tenant.list"]),
        ({"command": "tenant.delete", "id": "nobody"}, ["'nobody'"]),
        ({"label": ["x"]}, ["tenant.add", "'label'"]),
        ({"adapter": {**GIVEN["adapter"], "place": []}}, ["'adapter'", "'place'"]),
        ({"command": "tenant.key.add", "id": "zero", "day": 30}, ["tenant.key.add", "'day'"]),
        ({"command": "tenant.limit", "id": "zero", "rates": 5}, ["'rates'"]),
        ({"command": "tenant.list", "id": "zero"}, ["'id'"]),
        ({"command": "domain.add", "name": "../../etc", "version": 1}, ["../../etc/1"]),
        ({"command": "domain.delete", "name": "root"}, ["root"]),
        ({"command": "domain.add", "name": "bio", "version": 1.0}, ["'version'"]),
        ({"command": "domain.add", "name": "\ud800"}, []),
        *(({"command": command, "id": None}, []) for command in ("tenant.show", "tenant.delete", "tenant.limit")),
        *((deep, ["JSON"]) for deep in ("[" * 100_000, '{"command":' * 100_000)),
    ],
    ids=lambda value: ascii(value)[:80],
)
def test_wrong_values_are_refused_by_their_name(place, wrong, named):
    manager, commands = place
    with refusing(InvalidInput, *named) as refused:
        commands.run(wrong if isinstance(wrong, str) else json.dumps(wrong if "command" in wrong else {**GIVEN, **wrong}))
    assert str(refused.value).encode() and not manager.current().generation


def test_a_state_that_was_lost_is_not_begun_by_a_command(place):
    manager, commands = place
    folder = manager.state.folder.rename(manager.state.folder.with_name("lost"))
    lists = ({"command": command} for command in ("log", "tenant.list", "domain.list"))
    for one in (GIVEN, {"command": "tenant.limit", "id": "zero", "rate": 5}, *lists):
        with refusing(InvalidInput, manager.state.folder, "hplm begin"):
            commands.run(json.dumps(one))
    assert not manager.state.folder.exists(), "a command has begun a state"
    folder.rename(manager.state.folder)


def test_a_command_adds_what_a_manager_does(export, tmp_path):
    managers = [Manager.open(export.repository, tmp_path / name) for name in ("remote", "here")]
    for manager in managers:
        manager.registry.begin()
    commands = Commands(managers[0], BackboneConfig.load(managers[0].folder / "backbone.json"))
    assert json.loads(commands.run(json.dumps(GIVEN)))["after"] == 1
    managers[1].add("acme", learned(3))
    expect_same(*(seen(export.read(tmp_path / name)) for name in ("remote", "here")), "by a command")
    assert managers[0].current().find("acme").exits is not None
