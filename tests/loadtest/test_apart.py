"""Modules in processes of their own."""

from __future__ import annotations

import json

import pytest

from hplm.errors import HplmError
from loadtest.apart import run_module
from tests.support.message import mentioning


def test_a_module_reads_its_input_and_its_printout_comes_back() -> None:
    printed = run_module("json.tool", "--indent", 2, given='{"a": [1]}', limit=60)
    assert json.loads(printed) == {"a": [1]} and "\n  " in printed


def test_a_module_that_fails_is_named_with_the_end_of_its_errors() -> None:
    with pytest.raises(HplmError, match=mentioning("json.tool", "code 1", "Expecting value")):
        run_module("json.tool", given="no JSON", limit=60)


def test_a_module_that_does_not_end_is_stopped_and_named() -> None:
    with pytest.raises(HplmError, match=mentioning("http.server", "0.2 s")):
        run_module("http.server", 0, "--bind", "127.0.0.1", given="", limit=0.2)
