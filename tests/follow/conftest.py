"""A place with a live state, its source that can be made faulty, and a machine with a copy of it.

Followers wait longer for an answer here, because the machine that tests them may be busy, and try again at once.
"""

import pytest

from tests.follow.faulty import faulty
from tests.follow.machine import Machine
from tests.places import make_place
from tests.support.wait import PATIENCE


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path)


@pytest.fixture
def source(place):
    with faulty(place[2]) as source:
        yield source


@pytest.fixture
def machine(place, tmp_path, source):
    return Machine(place[1], tmp_path / "copy", source.url)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr("hplm.follow.source.TIMEOUT", PATIENCE)
    for module in ("records", "troubles"):
        monkeypatch.setattr(f"hplm.follow.{module}.LATER", 0.01)
