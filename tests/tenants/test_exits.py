"""Exits in snapshots, in changes of a live state and in remote commands."""

import base64
import json
from dataclasses import asdict, replace

import pytest
from safetensors.torch import save

from hplm.errors import Broken, InvalidInput
from hplm.levels.calibration import INTERVAL, Calibration
from hplm.model.config import BackboneConfig
from hplm.tenants.commands import Commands
from hplm.tenants.exits import Plan
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from testing.random_store import random_exits
from tests.places import answer, knowledge

WRONG = [
    {"plans": []}, {"record": None}, {"calibrations": []}, {"calibrations": [asdict(Calibration(INTERVAL))] * 2},
    *({"plans": [{**asdict(Plan(0, 0.5, 0.1, 0.9, 1.0)), **wrong}]} for wrong in ({"exit": 2}, {"threshold": 3}, {"cost": 0})),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_snapshots_with_exits_are_read_again_and_malformed_ones_are_refused(toy, tmp_path, wrong):
    whole = Snapshot.load(toy.folder / "tenants.json")
    whole.save(tmp_path / "3")
    assert Snapshot.load(tmp_path / "3").tenants == whole.tenants and whole.find("city").exits is not None
    stored = json.loads((tmp_path / "3").read_text())
    next(tenant for tenant in stored["tenants"] if tenant["id"] == "city")["exits"].update(wrong)
    (tmp_path / "3").write_text(json.dumps(stored))
    with pytest.raises(Broken, match="does not describe tenants"):
        Snapshot.load(tmp_path / "3")


def test_a_rollback_and_compacting_keep_exits(place):
    store, repository, state = place
    for name in ("new-a", "new-b"):
        random_exits(store, store.tenant(name))
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    live.add("new-b", knowledge(store, "new-b"))
    before, exits = answer(place, "new-b"), live.current().find("new-b").exits
    assert replace(exits, record=None) == knowledge(store, "new-b").exits.exits
    live.update("new-b", replace(knowledge(store, "new-b"), exits=None))
    assert live.current().find("new-b").exits is None
    live.roll_back("new-b")
    assert live.current().find("new-b").exits == exits
    live.delete("new-a")
    live.compact()
    assert (answer(place, "new-b") == before).all()


def test_exits_of_a_command_are_served_and_wrong_ones_refused(place):
    store, repository, state = place
    random_exits(store, store.tenant("new-a"))
    live, found = Manager.open(repository, state), knowledge(store, "new-a")
    live.registry.begin()
    commands = Commands(live, BackboneConfig.load(live.folder / "backbone.json"))
    tensors = {f"head.{key}": value.contiguous() for key, value in found.head[1].items()}
    for kind, layers in (("adapter", found.adapter[1]), ("exits", found.exits.heads)):
        tensors |= {f"{kind}.{i}.{key}": value.contiguous() for i, layer in enumerate(layers) for key, value in layer.items()}
    given = {
        "command": "tenant.add", "id": "new-a", "domain": "root", "domain_version": 1, "task": "classify", "labels": ["x", "y"],
        "adapter": {"kind": "bottleneck", "rank": 4}, "exits": found.exits.exits.described(),
        "tensors": base64.b64encode(save(tensors)).decode(),
    }  # fmt: skip
    lacking = base64.b64encode(save({name: one for name, one in tensors.items() if name != "exits.1.bias"})).decode()
    one_less = {**given["exits"], "calibrations": given["exits"]["calibrations"][:1]}
    for wrong in ({"exits": 3}, {"exits": {}}, {"exits": one_less}, {"tensors": lacking}):
        with pytest.raises(InvalidInput, match="exits"):
            commands.run(json.dumps({**given, **wrong}))
    commands.run(json.dumps(given))
    assert replace(live.current().find("new-a").exits, record=None) == found.exits.exits
    there = answer(place, "new-a")
    live.update("new-a", found)
    assert (answer(place, "new-a") == there).all()
