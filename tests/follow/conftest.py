"""Followers that wait longer for an answer, because the machine that tests them may be busy."""

import pytest

from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr("hplm.follow.source.TIMEOUT", PATIENCE)
