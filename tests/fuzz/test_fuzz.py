"""A minute of `python -m tests.fuzz`, by the same command. The cases are the same each time."""

import json
import subprocess
import sys

import pytest

from tests.fuzz.__main__ import ROOMS

pytestmark = pytest.mark.slow

CASES = {"wire": 1500, "files": 900}


@pytest.mark.parametrize("room", ROOMS)
def test_bad_input_breaks_nothing(room):
    command = [sys.executable, "-m", "tests.fuzz", *ROOMS[room], "--cases", str(CASES[room]), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert not found["failed"] and not done.returncode, [one for one in found["targets"].values() if "failure" in one]
    assert found["cases"] >= CASES[room] / 2  # a target with few different cases checks each of them once
