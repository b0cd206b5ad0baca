"""The bookkeeping of the isolation measurement, on a real server and with small numbers. It asserts no times."""

from __future__ import annotations

import json

import pytest

from loadtest import quiet
from loadtest.isolation import judged, main

SENT = 10
WAYS = ("streams", "overload")
SMALL = ["--seconds", "1", "--rate", str(SENT), "--streams", "120", "--long", "2", "--characters", "150000"]
SMALL += ["--flood", "4", "--texts", "2", "--words", "500", "--text", "ba be"]
SMALL += ["--backbone", "toy", "--quiet", "acme", "--noisy", "beta", "--json"]


@pytest.fixture
def short_noise(monkeypatch) -> None:
    """The noise still begins before the quiet tenant's requests."""
    monkeypatch.setattr(quiet, "BEFORE_S", 0.5)
    monkeypatch.setattr(quiet, "AFTER_S", 1.0)


def _quiet(in_time: int, p99_ms: float | None = 10.0) -> dict:
    return {"in_time": in_time, "in_time_share": in_time / 100, "p99_ms": p99_ms}


@pytest.mark.parametrize(
    ("beside", "by_server", "holds"),
    [
        (_quiet(100, 50.0), 100, True),
        (_quiet(98, 50.0), 98, False),  # too few in time
        (_quiet(100, 51.0), 100, False),  # too slow beside the other
        (_quiet(100, 50.0), 102, False),  # the server counts too many
        (_quiet(0, None), 0, False),
    ],
)
def test_it_holds_only_if_all_three_hold(beside, by_server, holds) -> None:
    assert judged(_quiet(100), beside, {}, by_server)["holds"] is holds


@pytest.mark.slow
@pytest.mark.server("toy")
@pytest.mark.usefixtures("short_noise")
def test_every_request_of_both_tenants_is_accounted_for(server, capsys) -> None:
    """Each way to misbehave takes seconds, so two of them."""
    at = server.server
    measured = _measured(["--url", at.http_url, "--grpc", at.grpc_url, "--metrics", at.metrics_url, "--ways", *WAYS], capsys)
    assert set(measured) == set(WAYS)
    for way in measured.values():
        for asked in (way["alone"], way["beside"]):
            assert asked["sent"] == SENT
            assert asked["in_time"] <= SENT - sum(asked["not_answered"].values())
        noisy = way["noisy"]
        assert noisy.get("answered", 0) + noisy.get("in_time", 0) > 0
        assert 0 <= way["in_time_by_server"] <= SENT + noisy.get("sent", 0)
    streams = measured["streams"]["noisy"]
    assert streams["failed"] == 0 and streams["in_flight_at_the_end"] <= 120


def _measured(more: list[str], capsys) -> dict:
    try:
        main([*more, *SMALL])
    except SystemExit as ended:  # whether it holds is a matter of time
        assert ended.code == 1
    return json.loads(capsys.readouterr().out)
