"""Lets the first line of a red test say what broke: the statement that failed, and who called the helper that has it."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

LONGEST = 160  # characters of a statement
WORDED = re.compile(r"AssertionError: (?!assert |Regex)|Failed: (?!DID NOT)")  # messages that a test or helper has written


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None and call.excinfo is not None:
        files = [(one, Path(one.path).parts) for one in call.excinfo.traceback]  # of generated code a path is a string
        ours = [one for one, parts in files if "tests" in parts and "site-packages" not in parts]
        said = [one for one in ours if str(one.path) != crash.path][-1:] if crash.path != str(item.path) else []
        if not WORDED.match(crash.message):
            said += [one for one in ours if (str(one.path), one.lineno + 1) == (crash.path, crash.lineno)][-1:]
        actual = re.findall(r"Actual message: .*", crash.message)  # of an error that `pytest.raises` met
        crash.message = ": ".join([*(_words(one, item.name) for one in said), *actual, crash.message])
    return report


def _words(entry: Any, test: str) -> str:
    """Returns a statement on one line, and before it the name of its function if that is not the test."""
    words = " ".join(str(entry.statement).split()).removeprefix("assert ").rstrip(":")
    words = words if len(words) <= LONGEST else f"{words[:LONGEST]} ..."
    return words if entry.name == test.partition("[")[0] else f"in {entry.name}, {words}"
