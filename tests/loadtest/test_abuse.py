"""Strangers at the real HAProxy before a real server, with small numbers. No time is asserted."""

from __future__ import annotations

import json

import pytest

from loadtest import quiet
from loadtest.abuse import LARGEST_ALLOWED, MOST_GROWTH_MB, WAYS, judged, main
from tests.deploy.door import require_haproxy

SENT = 10
OF_ONE_ADDRESS = 64  # the most connections
SLOW = 100  # more than those of one address, and less than those of three
BODIES = 2
MOST_HELD_MB = 2 * BODIES * LARGEST_ALLOWED / 1e6  # Triton may still hold a body when the next one arrives


def _quiet(in_time: int, p99_ms: float | None = 10.0) -> dict:
    return {"in_time": in_time, "in_time_share": in_time / 100, "p99_ms": p99_ms}


@pytest.mark.parametrize(
    ("beside", "memory", "log", "holds"),
    [
        (_quiet(100, 50.0), 50.0, 50.0, True),
        (_quiet(98, 50.0), 0.0, 0.0, False),  # too few in time
        (_quiet(100, 51.0), 0.0, 0.0, False),  # too slow beside the strangers
        (_quiet(100), 50.1, 0.0, False),
        (_quiet(100), 0.0, 50.1, False),
    ],
)
def test_it_holds_only_if_the_tenant_and_the_memory_and_the_log_do(beside, memory, log, holds) -> None:
    assert judged(_quiet(100), beside, {"shared_memory": memory, "log": log})["holds"] is holds


@pytest.mark.slow
def test_strangers_are_refused_and_the_quiet_tenant_is_answered(toy, capsys, monkeypatch) -> None:
    require_haproxy()
    monkeypatch.setattr(quiet, "DEADLINE_MS", 60_000)  # however slow this machine is
    monkeypatch.setattr(quiet, "BEFORE_S", 1.0)
    monkeypatch.setattr(quiet, "AFTER_S", 1.0)
    strangers = f"--slow {SLOW} --addresses 3 --body-mb 30 --bodies {BODIES} --flood 4".split()
    asked = f"--backbone toy --quiet acme --text ba --rate {SENT} --seconds 1".split()
    try:
        main(["--repository", str(toy.repository), *asked, *strangers, "--json"])
    except SystemExit as ended:  # whether it holds is a matter of time
        assert ended.code == 1
    measured = json.loads(capsys.readouterr().out)
    assert set(measured) == set(WAYS)
    for way in measured.values():
        for answered in (way["alone"], way["beside"]):
            assert answered["sent"] == SENT and answered["in_time"] == SENT - sum(answered["not_answered"].values()) > 0
        assert 0 <= way["shared_memory_growth_mb"] <= MOST_HELD_MB
        assert 0 <= way["log_growth_mb"] <= MOST_GROWTH_MB
    said = {name: way["strangers"] for name, way in measured.items()}
    refusals = {"411", "413", "reset", "closed"}  # whoever still sends may lose the answer
    assert sum(said["body"].get(how, 0) for how in refusals) > 0
    assert set(said["body"]) <= refusals | {"let_in", "refused", "megabytes", "open_at_the_end"}
    assert said["largest"]["404"] > 0
    assert said["slow"]["open_at_the_end"] <= OF_ONE_ADDRESS and said["slow"]["refused"] > 0
    assert OF_ONE_ADDRESS < said["slow_from_many"]["open_at_the_end"] <= SLOW
    assert set(said["unknown"]) <= {"404", "503", "reset"} and said["unknown"]["404"] > 0  # cut off where it is fast
