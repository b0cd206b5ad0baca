"""The calibration of a tenant's version in snapshots: published with its version, and kept by every other change."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from builder.publish.live import add_tenant, update_tenant
from builder.store.calibrations import calibration_of
from hplm.cli.main import main
from hplm.errors import Broken, InvalidInput
from hplm.levels.calibration import BINS, DIRICHLET, Calibration
from hplm.tenants.backup import back_up, restore
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state import State
from tests.places import calibrate, knowledge, learn, make_place
from tests.support.message import mentioning

WARM = Calibration(temperature=1.5)
MAP = Calibration(DIRICHLET, weights=((1.0, 0.1, 0.0), (0.0, 1.0, 0.2), (0.0, 0.0, 1.0)), bias=(0.0, 0.5, 0.0))

PAIR = Calibration(DIRICHLET, weights=((1.0, 0.0), (0.0, 1.0)), bias=(0.0, 0.0))  # for another number of labels


@pytest.fixture
def place(tmp_path):
    store, repository, state = make_place(tmp_path)
    return store, Manager.open(repository, state)


@pytest.mark.parametrize("calibration", [WARM, MAP])
def test_a_snapshot_is_read_as_it_was_saved(toy, tmp_path, calibration):
    exported = Snapshot.load(toy.folder / "tenants.json")
    changed = [replace(tenant, calibration=calibration if tenant.id == "acme" else None) for tenant in exported.tenants]
    Snapshot(0, exported.branches, changed, exported.export).save(tmp_path / "new.json")
    assert Snapshot.load(tmp_path / "new.json").tenants == tuple(changed)


@pytest.mark.parametrize("older", [3, 4, 5])
def test_snapshots_of_earlier_formats_have_no_calibration(toy, tmp_path, older):
    stored = json.loads((toy.folder / "tenants.json").read_text())
    tenants = [{name: value for name, value in tenant.items() if name != "calibration"} for tenant in stored["tenants"]]
    (tmp_path / "old.json").write_text(json.dumps({**stored, "format": older, "tenants": tenants}))
    assert {tenant.calibration for tenant in Snapshot.load(tmp_path / "old.json").tenants} == {None}


@pytest.mark.parametrize(
    "wrong",
    [
        3, {"kind": "temperature"}, {**asdict(WARM), "temperature": "hot"}, {**asdict(WARM), "temperature": 0},
        asdict(PAIR),
        asdict(Calibration(BINS, shares=(0.5,))),
    ],
)  # fmt: skip
def test_a_wrong_calibration_is_refused_when_the_snapshot_is_read(toy, tmp_path, wrong):
    stored = json.loads((toy.folder / "tenants.json").read_text())
    stored["tenants"][0]["calibration"] = wrong
    (tmp_path / "wrong.json").write_text(json.dumps(stored))
    with pytest.raises(Broken, match=mentioning(tmp_path / "wrong.json")):
        Snapshot.load(tmp_path / "wrong.json")


def test_it_is_published_with_its_version_and_kept_by_other_changes(place):
    store, live = place
    learn(store, "tenant-0", 2, seed=60)
    calibrate(store, "tenant-0", WARM)
    update_tenant(live, store, "tenant-0")
    live.add_key("tenant-0")
    live.limit("tenant-0", rate=5)
    live.compact()
    assert live.current().find("tenant-0").calibration == WARM
    learn(store, "tenant-0", 3, seed=61)  # a new version is not calibrated
    update_tenant(live, store, "tenant-0")
    assert live.current().find("tenant-0").calibration is None
    live.roll_back("tenant-0")
    tenant = live.current().find("tenant-0")
    assert (tenant.version, tenant.calibration, tenant.rate) == (2, WARM, 5)


def test_the_same_version_with_another_calibration_is_published_again_and_rolled_back(place):
    store, live = place
    calibrate(store, "new-a", WARM)
    first = add_tenant(live, store, "new-a")
    calibrate(store, "new-a", replace(WARM, temperature=3.0))
    second = update_tenant(live, store, "new-a")
    assert second.after > first.after and live.current().find("new-a").calibration == replace(WARM, temperature=3.0)
    live.roll_back("new-a")
    assert live.current().find("new-a").calibration == WARM


def test_a_backup_and_the_checks_of_all_files_know_it(place, tmp_path, capsys):
    store, live = place
    with pytest.raises(InvalidInput, match=mentioning("'tenant-1'", 3)):  # it has three labels
        live.update("tenant-1", replace(knowledge(store, "tenant-1"), calibration=PAIR))
    calibrate(store, "tenant-1", WARM)
    update_tenant(live, store, "tenant-1")
    back_up(live, tmp_path / "backup")
    restored = State(tmp_path / "restored/toy")
    restore(tmp_path / "backup", live.exported, restored)
    assert restored.load(1).find("tenant-1").calibration == WARM
    assert main(["verify", "--store", str(store.folder)]) == 0
    calibrate(store, "tenant-1", PAIR)
    capsys.readouterr()
    assert main(["verify", "--store", str(store.folder)]) == 1
    assert "tenant-1/1/calibration.json" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"calibration": {}}'])
def test_a_broken_file_in_the_store_is_named(place, content):
    store, _ = place
    calibrate(store, "new-a", WARM)
    path = store.tenant_folder("new-a", 1) / "calibration.json"
    path.write_text(content)
    with pytest.raises(Broken, match=mentioning(path)):
        calibration_of(store, store.tenant("new-a"))
