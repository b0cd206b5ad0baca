"""The entries of the bite list (`tests/bite`) fit today's tree."""

from pathlib import Path

from tests.bite.faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]


def test_each_fault_applies_exactly_once_and_its_rooms_have_tests():
    assert [said for fault in FAULTS if (said := fault.stale(ROOT))] == []
    assert all(fault.rooms for fault in FAULTS)
