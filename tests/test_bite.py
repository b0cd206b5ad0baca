"""The bite list (`tests/bite`): its entries fit today's tree, and a run that is ended leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hplm.server.process_group import arguments, lives
from loadtest.server import children
from tests.bite.faults import FAULTS
from tests.support.wait import PATIENCE, eventually

ROOT = Path(__file__).resolve().parents[1]


def test_each_fault_applies_exactly_once_and_its_rooms_have_tests():
    assert [said for fault in FAULTS if (said := fault.stale(ROOT))] == []
    assert all(fault.rooms for fault in FAULTS)


@pytest.mark.slow
def test_a_run_that_is_ended_ends_its_tests_and_removes_its_copy(tmp_path):
    """It copies the tree, and imports it."""
    command = [sys.executable, "-m", "tests.bite", "--only", FAULTS[0].name]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}) as bite:
        eventually(lambda: any("pytest" in arguments(child) for child in children(bite.pid)))
        (tests,) = children(bite.pid)
        bite.terminate()
        bite.wait(PATIENCE)
    assert not lives(tests) and not list(tmp_path.iterdir())
