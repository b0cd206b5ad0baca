"""Levels, ladders and links of served tenants: published with their version, and kept by every other change."""

import base64
import json
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import save

from builder.publish.export import export
from builder.publish.live import knowledge_of, update_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.levels import levels_of, save_ladder
from builder.store.links import save_link
from builder.store.store import TenantFile
from hplm.adapters.bank import Bank
from hplm.cli.main import main
from hplm.errors import InvalidInput
from hplm.levels.calibration import DIRICHLET, Calibration
from hplm.levels.plan import Plan, Step
from hplm.model.config import BackboneConfig
from hplm.tenants.backup import back_up, restore
from hplm.tenants.commands import Commands
from hplm.tenants.link import ONWARD, Link
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import LIVE
from hplm.tenants.state import State
from testing.random_store import random_level, random_stack, random_store, random_tenant
from testing.toy import CONFIG
from tests.places import calibrate
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

CHANGING = TenantFile("acme", 1, "root", 1, "classify", ["x", "y", "z"], 4)
HEADS = TenantFile("bare", 1, "root", 1, "classify", ["x", "y"], 0)  # heads alone
PLAIN = TenantFile("plain", 1, "root", 1, "classify", ["x", "y"], 4)
LADDER = (Plan((Step(0, 0.9, 2.0, 0.5), Step(2, weight=0.6))), Plan((Step(0),)))
WARM, HOT = Calibration(temperature=1.5), Calibration(temperature=3.0)


@pytest.fixture
def place(tmp_path):
    """Returns a store with two stacks, and its export, in which `acme` has two levels, `bare` one, and `plain` none."""
    tenants = [CHANGING, HEADS, PLAIN]
    store = random_store(tmp_path / "store", replace(CONFIG, upper_layers=3), tenants, corpus_tokens=500, spread=0.3)
    random_stack(store, "small", 1, seed=1)
    random_stack(store, "medium", 2, seed=2)
    random_level(store, HEADS, "small", 0.3, seed=20)
    put_levels(store, CHANGING, seed=10)
    export(store, tmp_path / "repository", ServingOptions())
    return store, Manager.open(tmp_path / "repository", tmp_path / "state")


def put_levels(store, tenant, seed):
    for number, stack in enumerate(("medium", "small")):
        random_level(store, tenant, stack, 0.3, seed + number, replace(WARM, temperature=1.5 + number))
    calibrate(store, tenant.id, HOT)
    save_ladder(store, tenant, LADDER)


def learn(store, tenant_id, version, seed):
    random_tenant(store, replace(store.tenant(tenant_id), version=version), 0.3, seed)


def bank_of(live, record):
    return Bank(live.state.bank(record.bank) if record.bank.startswith(LIVE) else live.folder / "adapters" / record.bank)


def assert_serves(live, store, tenant):
    """The published levels are those of the store, with their weights, calibrations and ladder."""
    served, stored = live.current().find(tenant.id), levels_of(store, tenant)
    assert [level.stack for level in served.levels] == [level.stack for level in stored]
    for level, own in zip(served.levels, stored, strict=True):
        adapter, head = own.weights()
        bank = bank_of(live, level.head)
        assert bank.owner(level.head.index) == (served.uid, served.version) == (level.head.uid, level.head.version)
        (weights,) = bank.weights(level.head)
        assert torch.equal(weights["weight"][: len(tenant.labels)], head["weight"].half())
        assert level.calibration == own.calibrated.calibration
        assert (level.adapter is None) == (adapter is None)
        if adapter is not None:
            bank = bank_of(live, level.adapter)
            assert bank.layout == own.adapter_layout
            for found, wanted in zip(bank.weights(level.adapter), adapter, strict=True):
                assert all(torch.equal(found[name], part.half()) for name, part in wanted.items())
    return served


def test_they_are_published_with_their_version_and_kept_by_other_changes(place, tmp_path, capsys):
    store, live = place
    learn(store, "acme", 2, seed=60)
    second = store.tenant("acme")
    put_levels(store, second, seed=30)
    update_tenant(live, store, "acme")
    live.add_key("acme")
    live.limit("acme", rate=5)
    before = assert_serves(live, store, second)
    learn(store, "plain", 2, seed=61)
    update_tenant(live, store, "plain")
    live.delete("plain")
    live.compact()
    after = assert_serves(live, store, second)
    assert (after.levels != before.levels, after.ladder, after.rate) == (True, LADDER, 5)
    learn(store, "acme", 3, seed=62)  # a new version has no levels
    update_tenant(live, store, "acme")
    assert (live.current().find("acme").levels, live.current().find("acme").ladder) == ((), ())
    live.compact()
    live.roll_back("acme")
    assert (assert_serves(live, store, second).ladder, live.current().find("acme").version) == (LADDER, 2)
    command = ["verify", "--repository", str(live.folder.parent.parent), "--state", str(live.state.folder.parent)]
    assert main(command) == 0, capsys.readouterr().err
    back_up(live, tmp_path / "backup")
    restored = State(tmp_path / "restored/toy")
    restore(tmp_path / "backup", live.exported, restored)
    tenant = restored.load(live.current().generation).find("acme")
    assert tenant == live.current().find("acme")
    assert all(restored.bank(record.bank).exists() for record in tenant.records())


def test_levels_that_do_not_fit_are_refused(place):
    store, live = place
    good = knowledge_of(store, CHANGING)
    small, medium = good.levels
    pair = Calibration(DIRICHLET, weights=((1.0, 0.0), (0.0, 1.0)), bias=(0.0, 0.0))
    for wrong, named in [
        (replace(good, levels=(medium, small)), ["small", "medium"]),
        (replace(good, levels=(small, small)), ["small"]),
        (replace(good, levels=(replace(small, stack="medium"), medium)), ["'medium'", 1, 2]),
        (replace(good, levels=(replace(small, calibration=pair), medium)), ["'small'", 3]),
        (replace(good, levels=(replace(small, head=knowledge_of(store, HEADS).levels[0].head), medium)), ["'small'", 3]),
        (replace(good, levels=(small,)), [2, 1, "hplm cascade select"]),
        (replace(good, calibration=None), ["hplm calibrate"]),
    ]:
        with pytest.raises(InvalidInput, match=mentioning("'new'", *named)):
            live.add("new", wrong)
    assert not live.current().generation
    live.add("new", good)
    assert live.current().find("new").ladder == LADDER


def tensors_of(weights, begin=""):
    adapter, head = weights
    found = {f"{begin}head.{name}": part for name, part in head.items()}
    return found | {f"{begin}adapter.{i}.{name}": part for i, layer in enumerate(adapter) for name, part in layer.items()}


WRONG = [
    ({"levels": 3}, ["'levels'"]),
    ({"levels": [3]}, ["'levels'"]),
    ({"levels": [{"stack": "small"}]}, ["'calibration'"]),
    ({"levels": [{"calibration": asdict(WARM)}]}, ["'stack'"]),
    ({"levels": [{"stack": "tiny", "calibration": asdict(WARM)}]}, ["'tiny'", "hplm build stack"]),
    ({"levels": [{"stack": "small", "calibration": {"kind": "cold"}}]}, ["'calibration'"]),
    ({"levels": [{"stack": "small", "calibration": asdict(WARM), "adapter": {"rank": 5}}]}, ["levels.small.adapter.0."]),
    ({"levels": [{"stack": "small", "calibration": asdict(WARM), "head_function": "tanh"}]}, ["levels.small.head.dense"]),
    ({"ladder": 3}, ["'ladder'"]),
    ({"ladder": [{"steps": [{"level": 1}, {"level": 0}]}]}, ["'ladder'"]),
    ({"ladder": [asdict(Plan((Step(7),)))]}, ["'new'", 7]),
]


@pytest.fixture
def remote(place):
    """Returns the place, its remote commands, and a command that adds a tenant with the levels of `acme`."""
    store, live = place
    levels, tensors = levels_of(store, CHANGING), tensors_of(store.tenant_weights(CHANGING))
    for level in levels:
        tensors |= tensors_of(level.weights(), f"levels.{level.stack}.")
    adapter = {"kind": "bottleneck", "rank": 4}
    described = [
        {"stack": level.stack, "adapter": adapter, "calibration": asdict(level.calibrated.calibration)} for level in levels
    ]
    command = {
        "command": "tenant.add", "id": "new", "domain": "root", "task": "classify", "labels": CHANGING.labels,
        "adapter": adapter, "calibration": asdict(HOT), "levels": described, "ladder": [asdict(plan) for plan in LADDER],
        "tensors": base64.b64encode(save({name: part.contiguous() for name, part in tensors.items()})).decode(),
    }  # fmt: skip
    live.state.begin()
    return store, live, Commands(live, BackboneConfig.load(live.folder / "backbone.json")), command


def test_the_admin_model_carries_them_and_refuses_wrong_ones(remote):
    _, live, commands, command = remote
    for wrong, named in WRONG:
        with pytest.raises(InvalidInput) as refused:
            commands.run(json.dumps({**command, **wrong}))
        assert all(str(one) in str(refused.value) for one in named)
    assert not live.current().generation
    commands.run(json.dumps(command))
    served = live.current().find("new")
    own = live.current().find("acme")
    assert served.ladder == LADDER and [level.stack for level in served.levels] == ["small", "medium"]
    for mine, theirs in zip(served.levels, own.levels, strict=True):
        assert mine.calibration == theirs.calibration
        for record, other in ((mine.head, theirs.head), (mine.adapter, theirs.adapter)):
            for found, wanted in zip(bank_of(live, record).weights(record), bank_of(live, other).weights(other), strict=True):
                assert all(torch.equal(found[name], part) for name, part in wanted.items())
    shown = json.loads(commands.run('{"command": "tenant.show", "id": "new"}'))
    assert [level["stack"] for level in shown["levels"]] == ["small", "medium"] and len(shown["ladder"]) == 2


def test_an_export_from_before_links_takes_no_tenant_with_a_link(place):
    store, live = place
    config = live.folder.parent.parent / "toy-upper/config.pbtxt"
    config.write_text(config.read_text().replace(f'"{ONWARD}"', '"ELSE"'))
    calibrate(store, "plain", WARM)
    save_link(store, PLAIN, Link("large", "plain", 1, Plan((Step(0, 0.7), Step(1, weight=0.6)))), {})
    with pytest.raises(InvalidInput, match=mentioning("'plain'", "export the repository again")):
        update_tenant(live, store, "plain")
    assert not live.current().generation
