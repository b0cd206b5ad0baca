from dataclasses import replace

import pytest

from hplm.adapters.record import Record
from hplm.errors import Broken
from hplm.levels.calibration import Calibration
from hplm.levels.plan import Plan, Step
from hplm.tenants.level import FULL, Level
from hplm.tenants.snapshot import Snapshot
from tests.tenants.edited import edited

LEVEL = Level("small", Record("head-16.bank", 7, 1, 1), Record("bottleneck-4-1.bank", 8, 1, 1), Calibration())
LADDER = (Plan((Step(0, 0.9, 2.0, 0.5), Step(1, weight=0.6)), cost=0.6), Plan((Step(0),), cost=0.25))


@pytest.fixture
def snapshot(toy):
    whole = Snapshot.load(toy.folder / "tenants.json")
    tenants = [replace(tenant, levels=(LEVEL,), ladder=LADDER) if tenant.id == "acme" else tenant for tenant in whole.tenants]
    return Snapshot(3, whole.branches, tenants, whole.export)


def test_levels_and_ladders_are_saved_and_loaded(snapshot, tmp_path):
    snapshot.save(tmp_path / "3")
    again = Snapshot.load(tmp_path / "3").find("acme")
    assert (again.levels, again.ladder) == ((LEVEL,), LADDER)
    assert [level.stack for level in again.all_levels] == ["small", FULL]
    assert (again.plans, again.costs) == (LADDER, (0.6, 0.25))
    assert "bottleneck-4-1.bank" in snapshot.banks()


def test_a_snapshot_whose_plans_have_no_cost_is_read(snapshot, tmp_path):
    snapshot.save(tmp_path / "3")
    with edited(tmp_path / "3", "acme") as stored:
        for plan in stored["ladder"]:
            del plan["cost"]
    again = Snapshot.load(tmp_path / "3").find("acme")
    assert ([plan.steps for plan in again.ladder], again.costs) == ([plan.steps for plan in LADDER], (1.0, 1.0))


def test_a_tenant_without_a_ladder_is_answered_by_its_own_level(snapshot):
    tenant = replace(snapshot.find("acme"), ladder=())
    assert (tenant.plans, tenant.costs) == ((Plan((Step(1),)),), (1.0,))
    assert tenant.all_levels[1] == Level(FULL, tenant.head, tenant.adapter, tenant.calibration)


def test_records_of_levels_move_with_those_of_their_tenant(snapshot):
    tenant, to = snapshot.find("acme"), Record("state/new.bank", 0, 1, 1)
    moved = tenant.moved({tenant.head: to, LEVEL.adapter: replace(to, index=1)})
    assert (moved.head, moved.adapter) == (to, tenant.adapter)
    assert moved.levels == (replace(LEVEL, adapter=replace(to, index=1)),)


@pytest.mark.parametrize(
    "change",
    [
        {"levels": [{"stack": "small", "head": {}, "adapter": None, "calibration": None}]},
        {"ladder": [{"steps": []}]},
        {"ladder": [{"steps": [{"level": 2}]}]},  # it has levels 0 and 1
        {"ladder": [{"steps": [{"level": 1}, {"level": 0}]}]},
        {"ladder": [{"steps": [{"level": 0, "cutoff": 2.0}]}]},
        {"ladder": [{"steps": [{"level": 0, "weight": "0.5"}]}]},
    ],
)
def test_a_ladder_that_cannot_be_climbed_is_broken(snapshot, tmp_path, change):
    snapshot.save(tmp_path / "3")
    with edited(tmp_path / "3", "acme") as stored:
        stored.update(change)
    with pytest.raises(Broken, match="does not describe tenants"):
        Snapshot.load(tmp_path / "3")
