"""Tenants are refused after they have ended the engine, also where nothing can be written."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hplm.engine import suspects
from hplm.engine.in_flight import Mark, number_of
from hplm.engine.suspects import Separation
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.tenants import quarantine
from hplm.tenants.quarantine import SECONDS, Quarantine
from tests.support.message import mentions as names_of

FOLDERS = [Path("repository/one/1"), Path("repository/two/1")]
GUILTY = Mark(7, number_of(1, 3), "acme")


@pytest.fixture
def of_two(tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "FOLDER", tmp_path)
    return Separation(FOLDERS, [Meter(), Meter()])


def ended_twice(of_two):
    of_two.ended([GUILTY])
    assert of_two.apart.quarantined == (frozenset(), frozenset())
    of_two.ended([GUILTY])
    assert of_two.apart.quarantined == (frozenset(), {"acme"})


def test_the_guilty_tenant_is_refused_until_it_is_released(of_two, caplog):
    ended_twice(of_two)
    assert Quarantine(FOLDERS[1].parent).release("acme")
    of_two.look()
    assert of_two.apart.quarantined == (frozenset(), frozenset())
    assert not names_of(caplog.text, "restart")


@pytest.mark.parametrize("lost", [False, True])
def test_a_tenant_whose_quarantine_cannot_be_written_is_refused_all_the_same(of_two, tmp_path, monkeypatch, caplog, lost):
    Quarantine(FOLDERS[1].parent)._file("acme").mkdir()
    if lost:
        monkeypatch.setattr(quarantine, "FOLDER", tmp_path / "gone")
    ended_twice(of_two)
    assert names_of(caplog.text, "acme", "no command", "restart")
    now = SimpleNamespace(time=lambda: 0.0, monotonic=lambda: separation_time + SECONDS - 60)
    separation_time = suspects.time.monotonic()
    monkeypatch.setattr(suspects, "time", now)
    of_two.look()
    assert of_two.apart.quarantined == (frozenset(), {"acme"})
    assert of_two._meters[1].take()[1][names.QUARANTINED_TENANTS, ()] == 1
    now.monotonic = lambda: separation_time + SECONDS
    monkeypatch.setattr(quarantine, "FOLDER", tmp_path)
    of_two.look()
    assert of_two.apart.quarantined == (frozenset(), frozenset())
