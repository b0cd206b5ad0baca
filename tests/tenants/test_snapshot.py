"""Snapshots as they are saved and read, those of earlier formats as well."""

import json
from dataclasses import asdict, replace

import pytest

from hplm.adapters.record import Record
from hplm.errors import Broken, InvalidInput, NoTenant
from hplm.levels.calibration import BINS, DIRICHLET, Calibration
from hplm.levels.plan import Plan, Step
from hplm.tenants.keys import Key
from hplm.tenants.level import Level
from hplm.tenants.link import Link
from hplm.tenants.snapshot import LIMITS, PROMISES, Snapshot
from testing.toy import TENANTS
from tests.support.message import mentioning


def test_a_saved_snapshot_is_loaded_unchanged(toy, tmp_path):
    snapshot = Snapshot.load(toy.folder / "tenants.json")
    snapshot.save(tmp_path / "copy.json")
    again = Snapshot.load(tmp_path / "copy.json")
    assert again.tenants == snapshot.tenants and again.branches == snapshot.branches
    assert [tenant.id for tenant in again.tenants] == [tenant.id for tenant in TENANTS]
    assert again.find("echo").adapter is None and again.by_uid(1).id == "acme"
    assert again.banks() == [
        "bottleneck-4x2-attention_out+ffn_out-gelu-bf16.bank",
        "bottleneck-4x2.bank",
        "bottleneck-8x2.bank",
        "head-16-bf16.bank",
        "head-16.bank",
        "head-64.bank",
        "head2-16-tanh.bank",
        "lora-2x2-query+key+attention_out+ffn_in+ffn_out.bank",
        "lora-4x2.bank",
    ]


MAP = Calibration(DIRICHLET, weights=((1.0, 0.1, 0.0), (0.0, 1.0, 0.2), (0.0, 0.0, 1.0)), bias=(0.0, 0.5, 0.0))
LEVEL = Level("small", Record("head-16.bank", 7, 1, 1), Record("bottleneck-4-1.bank", 8, 1, 1), Calibration())
LADDER = (Plan((Step(0, 0.9, 2.0, 0.5), Step(1, weight=0.6)), cost=0.6), Plan((Step(0),), cost=0.25))
GIVEN = {
    "keys": (Key("a1", "00" * 32, 0), Key("b2", "11" * 32, 99)),
    **{name: 3 + at for at, name in enumerate(("homes", *LIMITS))},
    **{"calibration": MAP, "levels": (LEVEL,), "ladder": LADDER, "stored": 7},
    "link": Link("large", "acme", 1, Plan((Step(0, 0.7, 4.0, 0.5), Step(2, weight=0.6)))),
}


@pytest.fixture
def whole(toy):
    """A snapshot in which one tenant has all that a tenant can have."""
    exported = Snapshot.load(toy.folder / "tenants.json")
    tenants = [replace(tenant, **GIVEN) if tenant.id == "acme" else tenant for tenant in exported.tenants]
    return Snapshot(3, exported.branches, tenants, exported.export)


def test_all_that_a_tenant_has_is_saved_and_loaded(whole, tmp_path):
    whole.save(tmp_path / "3")
    again = Snapshot.load(tmp_path / "3")
    assert again.tenants == whole.tenants and "bottleneck-4-1.bank" in again.banks()
    assert (again.find("acme").plans, again.find("acme").costs) == (LADDER, (0.6, 0.25))


PAIR = Calibration(DIRICHLET, weights=((1.0, 0.0), (0.0, 1.0)), bias=(0.0, 0.0))  # for another number of labels
LINK, WARM = asdict(GIVEN["link"]), asdict(Calibration(temperature=1.5))


@pytest.mark.parametrize(
    "change",
    [
        *({"calibration": wrong} for wrong in (3, {"kind": "temperature"}, {**WARM, "temperature": "hot"}, asdict(PAIR))),
        *({"calibration": wrong} for wrong in ({**WARM, "temperature": 0}, asdict(Calibration(BINS, shares=(0.5,))))),
        {"levels": [{"stack": "small", "head": {}, "adapter": None, "calibration": None}]},
        {"ladder": [{"steps": []}]},
        {"ladder": [{"steps": [{"level": 3}]}]},  # it has levels 0 and 1
        {"ladder": [{"steps": [{"level": 1}, {"level": 0}]}]},
        {"ladder": [{"steps": [{"level": 0, "cutoff": 2.0}]}]},
        {"ladder": [{"steps": [{"level": 0, "weight": "0.5"}]}]},
        {"link": {"backbone": "large"}},
        {"link": {**LINK, "version": "1"}},
        {"link": {**LINK, "plan": asdict(Plan((Step(2),)))}},  # nothing decides who goes on
        {"link": {**LINK, "plan": asdict(Plan((Step(0), Step(3))))}},  # the tenant has two levels
        {"calibration": None},
        {"stored": "1"},
    ],
    ids=str,
)
def test_a_snapshot_with_a_part_that_cannot_be_served_is_broken(whole, tmp_path, change):
    path = tmp_path / "3"
    whole.save(path)
    stored = json.loads(path.read_text())
    next(tenant for tenant in stored["tenants"] if tenant["id"] == "acme").update(change)
    path.write_text(json.dumps(stored))
    with pytest.raises(Broken, match="does not describe tenants"):
        Snapshot.load(path)


CASCADE = ("levels", "ladder", "link", "stored")


@pytest.mark.parametrize(
    ("format", "missing"),
    [
        (7, ("homes",)), (6, ("homes", "link", "stored")), (5, ("homes", *CASCADE, "calibration")),
        (4, ("homes", *CASCADE, "calibration", *PROMISES)), (2, ("keys", "homes", *LIMITS, *CASCADE, "calibration")),
    ],
)  # fmt: skip
def test_snapshots_of_earlier_formats_have_less(toy, tmp_path, format, missing):
    stored = json.loads((toy.folder / "tenants.json").read_text())
    old = [{name: value for name, value in tenant.items() if name not in missing} for tenant in stored["tenants"]]
    (tmp_path / "old.json").write_text(json.dumps({**stored, "format": format, "tenants": old}))
    assert Snapshot.load(tmp_path / "old.json").tenants == Snapshot.load(toy.folder / "tenants.json").tenants


@pytest.mark.parametrize("tenant", [None, "", "ACME", "nobody", 7])
def test_unknown_and_missing_tenants_get_the_same_error(toy, tenant):
    with pytest.raises(NoTenant) as error:
        Snapshot.load(toy.folder / "tenants.json").find(tenant)
    assert error.value.wire().startswith("[no_tenant]")


def test_snapshots_that_cannot_be_read_are_named(toy, tmp_path):
    path = tmp_path / "tenants.json"
    with pytest.raises(InvalidInput, match=mentioning(path)):
        Snapshot.load(path)
    path.write_text("{")
    with pytest.raises(Broken, match=mentioning(path)):
        Snapshot.load(path)
    path.write_text(json.dumps({**json.loads((toy.folder / "tenants.json").read_text()), "format": 99}))
    with pytest.raises(InvalidInput, match=mentioning(path, 99)):
        Snapshot.load(path)
