"""The bite list (`tests/bite`): its entries fit today's tree."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.bite.faults import FAULTS
from tests.bite.rooms import ROOMS

ROOT = Path(__file__).resolve().parents[1]


def test_each_fault_applies_exactly_once():
    assert [said for fault in FAULTS if (said := fault.stale(ROOT))] == []


def test_each_fault_changes_something_and_has_a_name_and_rooms_of_its_own():
    assert [name for name, times in Counter(fault.name for fault in FAULTS).items() if times > 1] == []
    assert [fault.name for fault in FAULTS if not fault.rooms or not set(fault.rooms) <= ROOMS.keys()] == []
    assert [fault.name for fault in FAULTS for edit in fault.edits if edit.old == edit.new] == []
