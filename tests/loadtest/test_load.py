"""Loads in processes of their own: all begin together, and one that fails or does not end is told at once."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest

from hplm.errors import HplmError
from loadtest import load, server
from loadtest.load import send


@dataclass(frozen=True)
class Doing:
    """A load that sends nothing."""

    what: str
    limit_s: float = 60.0

    def run(self) -> tuple[str, int]:
        if self.what == "refuses":
            raise HplmError("no server")
        if self.what == "dies":
            os._exit(3)
        while self.what == "hangs":
            time.sleep(60)
        return self.what, os.getpid()


def test_reports_come_in_the_order_of_the_loads_each_from_a_process_of_its_own() -> None:
    (first, one), (second, other) = send(Doing("first"), Doing("second"))
    assert (first, second) == ("first", "second") and len({one, other, os.getpid()}) == 3


@pytest.mark.parametrize(
    ("what", "named"), [("refuses", "no server"), ("dies", "without a report"), ("hangs", "did not end within")]
)
def test_a_load_that_fails_or_does_not_end_ends_the_others(what: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "START_S", 0.1 if what == "hangs" else 3600.0)
    with pytest.raises(HplmError, match=named):
        send(Doing("hangs", limit_s=0.1), Doing(what, limit_s=0.1))


@pytest.mark.parametrize(
    ("command", "start_s", "named"), [("doctor", 0.0, "not ready within"), ("luck", 600.0, "does not start")]
)
def test_a_server_that_is_never_ready_is_stopped_and_named(tmp_path, monkeypatch, command, start_s, named) -> None:
    monkeypatch.setattr(server, "START_S", start_s)
    with pytest.raises(HplmError, match=named):
        server.Running([command], tmp_path / "output", "^Ready")
