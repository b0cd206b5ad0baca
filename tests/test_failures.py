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
    assert len([]) == 2

def test_helper():
    keep([3])

def test_wait():
    eventually(lambda: False, patience=0.01)

def test_refusal():
    with pytest.raises(ValueError, match="three"):
        int("3")

def test_message():
    with pytest.raises(ValueError, match="three"):
        int("four")

def test_error():
    keep(int("three"))

def test_named():
    assert 1 == 2, "one is another"
"""


def test_what_was_asserted_and_who_asked_stand_in_the_first_line(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_red.py").write_text(RED)
    command = [sys.executable, "-m", "pytest", "--tb=no", "-p", "tests.support.failures", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "500"}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert [line.partition("::test_")[2] for line in said.splitlines() if line.startswith("FAILED")] == [
        "values - len([]) == 2: assert 0 == 2",
        "helper - in keep, not left: assert not [3]",
        "wait - eventually(lambda: False, patience=0.01): AssertionError: it has not come true in 0.01 s",
        'refusal - with pytest.raises(ValueError, match="three"): Failed: DID NOT RAISE ValueError',
        'message - with pytest.raises(ValueError, match="three"): AssertionError: Regex pattern did not match.',
        "error - keep(int(\"three\")): ValueError: invalid literal for int() with base 10: 'three'",
        "named - AssertionError: one is another",
    ]
