"""The first line of a red test says what broke (`tests/support/failures.py`)."""

import os
import subprocess
import sys
from pathlib import Path

RED = """
import pytest
from tests.support.wait import eventually

def keep(left):
    assert not left

def test_values():
    assert len("abc") == 2

def test_helper():
    keep([3])

def test_wait():
    eventually(lambda: "abc" == "d", patience=0.01)

def test_refusal():
    with pytest.raises(KeyError):
        int("3")

def test_named():
    assert 1 == 2, "one is another"
"""


def test_what_was_asserted_and_who_asked_stand_in_the_first_line(tmp_path):
    (tmp_path / "test_red.py").write_text(RED)
    command = [sys.executable, "-m", "pytest", "--tb=no", "-p", "tests.support.failures", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "500"}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    lines = [line.partition("::")[2] for line in said.splitlines() if line.startswith("FAILED")]
    assert lines == [
        'test_values - len("abc") == 2: AssertionError: assert 3 == 2',
        "test_helper - in keep, not left: assert not [3]",
        'test_wait - eventually(lambda: "abc" == "d", patience=0.01): AssertionError: it has not come true in 0.01 s',
        "test_refusal - with pytest.raises(KeyError): Failed: DID NOT RAISE KeyError",
        "test_named - AssertionError: one is another",
    ]
