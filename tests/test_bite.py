"""The bite list (`tests/bite`): its entries fit today's tree."""

from __future__ import annotations

from pathlib import Path

from tests.bite.faults import FAULTS
from tests.bite.rooms import ROOMS

ROOT = Path(__file__).resolve().parents[1]


def test_each_fault_applies_exactly_once_and_names_rooms():
    assert [said for fault in FAULTS if (said := fault.stale(ROOT))] == []
    assert [fault.name for fault in FAULTS if not fault.rooms or not set(fault.rooms) <= ROOMS.keys()] == []
