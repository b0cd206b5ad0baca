"""Snapshots as they are saved and read, those of earlier formats as well."""

import json
from dataclasses import asdict, replace
from unittest import mock

import pytest

from hplm.calibration import Calibration
from hplm.errors import Broken, InvalidInput
from hplm.tenants.exits import Plan
from hplm.tenants.keys import Key
from hplm.tenants.snapshot import LIMITS, Snapshot, checked
from hplm.tenants.students import Team
from testing.toy import SERVED
from tests.support.message import refusing

GIVEN = {
    "keys": (Key("a1", "00" * 32, 0), Key("b2", "11" * 32, 99)),
    **{name: 3 + at for at, name in enumerate(("homes", *LIMITS))},
    **{"calibration": Calibration(temperature=1.5), "stored": 7},
}


@pytest.fixture
def whole(toy):
    """A snapshot in which `acme` has all that a tenant can have, but for the exits of `city`, and may be rolled back."""
    exported = Snapshot.load(toy.folder / "tenants.json")
    tenants = [replace(tenant, **GIVEN) if tenant.id == "acme" else tenant for tenant in exported.tenants]
    ledger = replace(exported.ledger, last_versions={"beta": 4}, before=(exported.find("acme"),), resting=(("a-name", 1.5),))
    return Snapshot(3, exported.branches, tenants, exported.export, ledger)


def test_a_saved_snapshot_is_loaded_unchanged(whole, tmp_path):
    whole.save(tmp_path / "copy.json")
    again = Snapshot.load(tmp_path / "copy.json")
    assert (again.tenants, again.branches, again.ledger) == (whole.tenants, whole.branches, whole.ledger)
    assert [tenant.id for tenant in again.tenants] == [tenant.id for tenant in SERVED] and again.by_uid(1).id == "acme"
    assert again.find("echo").adapter is None and again.find("city").exits is not None
    assert {key.partition(",")[0] for key in again.layouts} == {"bottleneck", "exit", "head", "head2", "lora"}
    assert again.ledger.next_uid == len(SERVED) + 1


WARM, BINS = asdict(Calibration(temperature=1.5)), asdict(Calibration("bins"))
PLAN = asdict(Plan(0, 0.5, 0.1, 0.9, 1.0))
TEAM = asdict(Team(2, 1.0))
WRONG = [
    *({"calibration": wrong} for wrong in (3, {**WARM, "temperature": "hot"}, {**WARM, "temperature": 0})),
    *({"stored": "1"}, {"homes": 0}, {"uid": None}, {"head": 3}),
    *({"exits": {"plans": wrong}} for wrong in ([], [{**PLAN, "exit": 2}], [{**PLAN, "threshold": 3}], [{**PLAN, "cost": 0}])),
    *({"exits": {"calibrations": wrong}} for wrong in ([], [{**WARM, "temperature": -1}] * 2)),
    {"exits": {"record": None}},
    *({"students": {"teams": wrong}} for wrong in ([], [{**TEAM, "members": 3}], [{**TEAM, "cost": 0}], [TEAM, TEAM])),
    *({"students": wrong} for wrong in ({"depth": 0}, {"members": []}, {"teams": [{**TEAM, "calibration": BINS}]})),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_snapshot_with_a_part_that_cannot_be_served_is_broken(whole, tmp_path, wrong):
    path = tmp_path / "3"
    whole.save(path)
    stored = json.loads(path.read_text())
    (part,) = wrong
    tenant = next(
        tenant for tenant in stored["tenants"] if tenant["id"] == {"exits": "city", "students": "iris"}.get(part, "acme")
    )
    tenant[part] = {**tenant[part], **wrong[part]} if part in ("exits", "students") else wrong[part]
    path.write_text(json.dumps(stored))
    with refusing(Broken, "does not describe tenants"):
        Snapshot.load(path)


def test_other_threads_go_on_while_the_tenants_of_a_snapshot_are_read(whole):
    """One call of C for all of them would keep the requests of the process waiting."""
    stored = json.loads(whole.written())
    *others, last = stored["tenants"]
    last["uid"] = None
    each = mock.patch("hplm.tenants.snapshot.checked", side_effect=checked)
    with refusing(Broken, f"tenants[{len(others)}]"), each as calls:
        Snapshot.read(json.dumps(stored).encode(), "here")
    assert calls.call_count == 1 + len(others), "the last one was read together with others"


def test_a_missing_snapshot_and_one_of_another_format_are_told_from_a_broken_one(tmp_path):
    """Other bad files: `tests/refusals/test_files.py`."""
    path = tmp_path / "tenants.json"
    with refusing(InvalidInput, path):
        Snapshot.load(path)
    for text, error in (('{"format": 99}', InvalidInput), ("{", Broken)):
        path.write_text(text)
        with refusing(error, path):
            Snapshot.load(path)
