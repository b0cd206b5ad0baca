"""Snapshots as they are saved and read, those of earlier formats as well."""

import json
from dataclasses import asdict, replace

import pytest

from hplm.errors import Broken, InvalidInput, NoTenant
from hplm.levels.calibration import BINS, DIRICHLET, Calibration
from hplm.tenants.keys import Key
from hplm.tenants.snapshot import LIMITS, Snapshot
from testing.toy import TENANTS
from tests.support.message import mentioning


def test_a_saved_snapshot_is_loaded_unchanged(toy, tmp_path):
    snapshot = Snapshot.load(toy.folder / "tenants.json")
    snapshot.save(tmp_path / "copy.json")
    again = Snapshot.load(tmp_path / "copy.json")
    assert again.tenants == snapshot.tenants and again.branches == snapshot.branches
    assert [tenant.id for tenant in again.tenants] == [tenant.id for tenant in TENANTS]
    assert again.find("echo").adapter is None and again.by_uid(1).id == "acme"
    assert {key.partition(",")[0] for key in again.layouts} == {"bottleneck", "exit", "head", "head2", "lora"}
    assert again.ledger == snapshot.ledger and again.ledger.next_uid == len(TENANTS) + 1


MAP = Calibration(DIRICHLET, weights=((1.0, 0.1, 0.0), (0.0, 1.0, 0.2), (0.0, 0.0, 1.0)), bias=(0.0, 0.5, 0.0))
GIVEN = {
    "keys": (Key("a1", "00" * 32, 0), Key("b2", "11" * 32, 99)),
    **{name: 3 + at for at, name in enumerate(("homes", *LIMITS))},
    **{"calibration": MAP, "stored": 7},
}


@pytest.fixture
def whole(toy):
    """A snapshot in which one tenant has all that a tenant can have."""
    exported = Snapshot.load(toy.folder / "tenants.json")
    tenants = [replace(tenant, **GIVEN) if tenant.id == "acme" else tenant for tenant in exported.tenants]
    return Snapshot(3, exported.branches, tenants, exported.export)


def test_all_that_a_tenant_has_is_saved_and_loaded(whole, tmp_path):
    whole.save(tmp_path / "3")
    assert Snapshot.load(tmp_path / "3").tenants == whole.tenants


PAIR = Calibration(DIRICHLET, weights=((1.0, 0.0), (0.0, 1.0)), bias=(0.0, 0.0))  # for another number of labels
WARM = asdict(Calibration(temperature=1.5))


@pytest.mark.parametrize(
    "change",
    [
        *({"calibration": wrong} for wrong in (3, {"kind": "dirichlet"}, {**WARM, "temperature": "hot"}, asdict(PAIR))),
        *({"calibration": wrong} for wrong in ({**WARM, "temperature": 0}, asdict(Calibration(BINS, shares=(0.5,))))),
        {"stored": "1"},
        {"homes": 0},
        {"uid": None},
        {"head": 3},
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
    path.write_text("[]")
    with pytest.raises(Broken, match=mentioning(path)):
        Snapshot.load(path)
