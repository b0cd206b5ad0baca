"""The first line of a red test says what broke (`tests/support/failures.py`)."""

import os
import subprocess
import sys
from pathlib import Path

HEAD = """
import pytest
from tests.support.wait import eventually
def keep(left):
    assert not left
"""
SAID = {  # of a test of one statement
    "assert len([]) == 2": "len([]) == 2: assert 0 == 2",
    "assert 1 == 2, 'one is another'": "AssertionError: one is another",
    "keep([3])": "in keep, not left: assert not [3]",
    "keep(int('x'))": "keep(int('x')): ValueError: invalid literal for int() with base 10: 'x'",
    "eventually(list, 0.01)": "eventually(list, 0.01): AssertionError: it has not come true in 0.01 s",
    "with pytest.raises(KeyError): keep([])": "with pytest.raises(KeyError): keep([]): Failed: DID NOT RAISE KeyError",
    "with pytest.raises(KeyError, match='y'): {}[1]": (
        "with pytest.raises(KeyError, match='y'): {}[1]: Actual message: '1': AssertionError: Regex pattern did not match."
    ),
}


def test_what_was_asserted_and_who_asked_stand_in_the_first_line(tmp_path):
    (tmp_path / "tests").mkdir()
    tests = [f"def test_{number}():\n    {statement}\n" for number, statement in enumerate(SAID)]
    (tmp_path / "tests/test_red.py").write_text(HEAD + "".join(tests))
    command = [sys.executable, "-m", "pytest", "--tb=no", "-p", "tests.support.failures", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "500"}
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert [line.partition(" - ")[2] for line in printed.splitlines() if line.startswith("FAILED")] == [*SAID.values()]
