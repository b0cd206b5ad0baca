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


@pytest.fixture
def place(tmp_path):
    store, repository, state = make_place(tmp_path)
    folder = repository / "toy/1"
    manager = Manager(folder, state)
    manager.state.begin()
    return store, manager, Commands(manager, BackboneConfig.load(folder / "backbone.json"))


@pytest.mark.parametrize("calibration", [3, {"kind": "temperature"}, {**asdict(Calibration()), "temperature": -1}])
def test_a_calibration_is_checked_and_published(place, calibration):
    store, manager, commands = place
    known = Calibration(temperature=1.5)
    with pytest.raises(InvalidInput, match="'calibration'"):
        commands.run(json.dumps({**trained(store), "calibration": calibration}))
    commands.run(json.dumps({**trained(store), "calibration": asdict(known)}))
    assert manager.current().find("acme").calibration == known


def test_a_state_that_was_lost_is_not_begun_by_a_command(place):
    store, manager, commands = place
    shutil.rmtree(manager.state.folder)
    for command in (trained(store), {"command": "tenant.limit", "id": "tenant-0", "rate": 5}, {"command": "log"}):
        with pytest.raises(InvalidInput, match=mentioning(manager.state.folder, "hplm begin")):
            commands.run(json.dumps(command))
    assert json.loads(commands.run('{"command": "tenant.list"}'))["tenants"]  # what the export says
    assert not manager.state.folder.exists()


def strange_type():
    """A safetensors file with a type that torch does not have."""
    header = json.dumps({"head.weight": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    return base64.b64encode(len(header).to_bytes(8, "little") + header + b"1").decode()


def test_deep_json_wrong_bytes_and_wrong_labels_are_refused(place):
    store, _, commands = place
    for deep in ("[" * 100_000, '{"command":' * 100_000):
        with pytest.raises(InvalidInput, match="JSON"):
            commands.run(deep)
    for tensors in ("\u00e9", "\ud800", strange_type()):
        with pytest.raises(InvalidInput, match="'tensors'"):
            commands.run(json.dumps({**trained(store), "tensors": tensors}))
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "UTF-8")) as caught:
        commands.run(json.dumps({**trained(store), "labels": ["\ud800", "y"]}))
    assert str(caught.value).encode()
    with pytest.raises(InvalidInput) as caught:
        commands.run(json.dumps({"command": "domain.add", "name": "\ud800"}))
    assert str(caught.value).encode()
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "'x'")):
        commands.run(json.dumps({**trained(store), "labels": ["x", "x"]}))


def trained(store):
    adapter, head = store.tenant_weights(TenantFile("new-a", 1, "root", 1, "classify", ["x", "y"], 4))
    tensors = {f"head.{key}": value.contiguous() for key, value in head.items()}
    tensors |= {f"adapter.{i}.{key}": value.contiguous() for i, layer in enumerate(adapter) for key, value in layer.items()}
    return {
        "command": "tenant.add",
        "id": "acme",
        "domain": "root",
        "domain_version": 1,
        "task": "classify",
        "labels": ["x", "y"],
        "adapter": {"kind": "bottleneck", "rank": 4},
        "tensors": base64.b64encode(save(tensors)).decode(),
    }


def test_versions_and_ranks_are_whole_numbers(place):
    store, manager, commands = place
    good = trained(store)
    for name, value in [("domain_version", 1.0), ("domain_version", True), ("domain_version", [1]), ("domain_version", 0)]:
        with pytest.raises(InvalidInput, match=mentioning("'domain_version'", repr(value))):
            commands.run(json.dumps({**good, name: value}))
    with pytest.raises(InvalidInput, match=mentioning("'rank'", True)):
        commands.run(json.dumps({**good, "adapter": {"kind": "bottleneck", "rank": True}}))
    with pytest.raises(InvalidInput, match=mentioning("'version'", 1.0)):
        commands.run('{"command": "domain.add", "name": "bio", "version": 1.0}')
    assert json.loads(commands.run(json.dumps(good)))["after"] == 1
    assert manager.current().find("acme").domain_version == 1


@pytest.mark.parametrize(
    "wrong",
    [{"command": ["tenant.add"]}, {"head_function": 3}, {"labels": [1, 2]}, {"id": 7}, {"tensors": [1]}, {"task": ["classify"]}]
    + [{"adapter": {"rank": 4, **part}} for part in ({"kind": 1}, {"places": 3}, {"places": [4]}, {"function": {}})],
    ids=str,
)
def test_values_of_a_wrong_type_are_refused(place, wrong):
    store, manager, commands = place
    with pytest.raises(InvalidInput):
        commands.run(json.dumps({**trained(store), **wrong}))
    assert not manager.current().generation


def test_commands_about_a_tenant_need_its_id_even_if_none_is_served(place):
    _, manager, commands = place
    for tenant in manager.current().tenants:
        manager.delete(tenant.id)
    for command in ("tenant.show", "tenant.delete", "tenant.limit"):
        with pytest.raises(InvalidInput, match=mentioning(command, "'id'")):
            commands.run(json.dumps({"command": command}))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1", "1e13", "true", '"1"', f"1{'0' * 400}"])
def test_wrong_days_and_limits_are_refused(place, number):
    _, manager, commands = place
    with pytest.raises(InvalidInput, match=mentioning("'days'", repr(json.loads(number)))):
        commands.run(f'{{"command": "tenant.key.add", "id": "tenant-0", "days": {number}}}')
    with pytest.raises(InvalidInput, match="'rate'"):
        commands.run(f'{{"command": "tenant.limit", "id": "tenant-0", "rate": {number}}}')
    assert not manager.current().generation
