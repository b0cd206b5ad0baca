"""Remote commands are checked like those of the command line. tests/server/test_admin.py tests a real server."""

import base64
import json
import shutil
from dataclasses import asdict

import pytest
from safetensors.torch import save

from builder.store.store import TenantFile
from hplm.errors import InvalidInput
from hplm.levels.calibration import Calibration
from hplm.model.config import BackboneConfig
from hplm.tenants.commands import Commands
from hplm.tenants.manager import Manager
from tests.places import make_place
from tests.support.message import mentioning

KNOWN = Calibration(temperature=1.5)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A manager, its remote commands, and one that adds a tenant. What is refused changes nothing: all tests have one state."""
    store, repository, state = make_place(tmp_path_factory.mktemp("place"))
    folder = repository / "toy/1"
    manager = Manager(folder, state)
    manager.registry.begin()
    adapter, head = store.tenant_weights(TenantFile("new-a", 1, "root", 1, "classify", ["x", "y"], 4))
    tensors = {f"head.{key}": value.contiguous() for key, value in head.items()}
    tensors |= {f"adapter.{i}.{key}": value.contiguous() for i, layer in enumerate(adapter) for key, value in layer.items()}
    given = {
        "command": "tenant.add",
        "id": "acme",
        "domain": "root",
        "domain_version": 1,
        "task": "classify",
        "labels": ["x", "y"],
        "adapter": {"kind": "bottleneck", "rank": 4},
        "calibration": asdict(KNOWN),
        "tensors": base64.b64encode(save(tensors)).decode(),
    }
    return manager, Commands(manager, BackboneConfig.load(folder / "backbone.json")), given


def strange_type():
    """A safetensors file with a type that torch does not have."""
    header = json.dumps({"head.weight": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    return base64.b64encode(len(header).to_bytes(8, "little") + header + b"1").decode()


@pytest.mark.parametrize(
    "wrong, named",
    [
        *(({"calibration": given}, ["'calibration'"]) for given in (3, {"kind": "temperature"}, {"temperature": -1})),
        *(({"tensors": given}, ["'tensors'"]) for given in ("\u00e9", "\ud800", strange_type(), [1])),
        *(({"domain_version": given}, ["'domain_version'", repr(given)]) for given in (1.0, True, [1], 0)),
        ({"labels": ["\ud800", "y"]}, ["'acme'", "UTF-8"]),
        ({"labels": ["x", "x"]}, ["'acme'", "'x'"]),
        ({"labels": [1, 2]}, ["'labels'"]),
        ({"adapter": {"kind": "bottleneck", "rank": True}}, ["'rank'", True]),
        *(({"adapter": {"rank": 4, **part}}, []) for part in ({"kind": 1}, {"places": 3}, {"places": [4]}, {"function": {}})),
        *(({"command": ["tenant.add"]}, []), ({"id": 7}, []), ({"task": ["classify"]}, []), ({"head_function": 3}, [])),
        ({"command": "domain.add", "name": "bio", "version": 1.0}, ["'version'", 1.0]),
        ({"command": "domain.add", "name": "\ud800"}, []),
        *(({"command": command, "id": None}, []) for command in ("tenant.show", "tenant.delete", "tenant.limit")),
    ],
    ids=ascii,
)
def test_wrong_values_are_refused_by_their_name(place, wrong, named):
    manager, commands, given = place
    with pytest.raises(InvalidInput, match=mentioning(*named)) as refused:
        commands.run(json.dumps({**given, **wrong}))
    assert str(refused.value).encode() and not manager.current().generation


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"command":' * 100_000], ids=["list", "object"])
def test_deep_json_is_refused(place, deep):
    with pytest.raises(InvalidInput, match="JSON"):
        place[1].run(deep)


def test_a_state_that_was_lost_is_not_begun_by_a_command(place):
    manager, commands, given = place
    folder = manager.state.folder.rename(manager.state.folder.with_name("lost"))
    lists = ({"command": command} for command in ("log", "tenant.list", "domain.list"))
    for command in (given, {"command": "tenant.limit", "id": "tenant-0", "rate": 5}, *lists):
        with pytest.raises(InvalidInput, match=mentioning(manager.state.folder, "hplm begin")):
            commands.run(json.dumps(command))
    assert not manager.state.folder.exists()
    folder.rename(manager.state.folder)


def test_a_tenant_is_added_with_its_calibration(place, tmp_path):
    manager, _, given = place
    shutil.copytree(manager.state.folder.parent, tmp_path / "state")
    own = Manager(manager.folder, tmp_path / "state")
    commands = Commands(own, BackboneConfig.load(own.folder / "backbone.json"))
    assert json.loads(commands.run(json.dumps(given)))["after"] == 1
    assert own.current().find("acme").calibration == KNOWN
