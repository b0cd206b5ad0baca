"""The bookkeeping of the isolation measurement, on a real server and with small numbers. It asserts no times."""

from __future__ import annotations

import json

import pytest

from loadtest import quiet
from loadtest.isolation import WAYS, judged, main
from tests.deploy.door import require_haproxy
from tests.support.servers import serving

SENT = 10
SMALL = ["--seconds", "1", "--rate", str(SENT), "--streams", "120", "--long", "2", "--characters", "150000"]
SMALL += ["--flood", "4", "--texts", "2", "--words", "500", "--text", "ba be"]
SMALL += ["--backbone", "toy", "--quiet", "acme", "--noisy", "beta", "--json"]


@pytest.fixture
def short_noise(monkeypatch) -> None:
    """The noise still begins before the quiet tenant's requests."""
    monkeypatch.setattr(quiet, "BEFORE_S", 0.5)
    monkeypatch.setattr(quiet, "AFTER_S", 2.0)


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


@pytest.mark.parametrize(("by_server", "holds"), [(1000, True), (1010, True), (1011, False), (989, False)])
def test_the_noisy_tenants_answers_in_time_are_compared_too(by_server, holds) -> None:
    assert judged(_quiet(100), _quiet(100), {"in_time": 900}, by_server)["holds"] is holds


@pytest.mark.slow
@pytest.mark.usefixtures("short_noise")
def test_every_request_of_both_tenants_is_accounted_for(toy, capsys) -> None:
    with serving(toy.repository) as server:
        addresses = ["--url", server.http_url, "--grpc", server.grpc_url, "--metrics", server.metrics_url]
        measured = _measured(addresses, capsys)
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


@pytest.mark.slow
@pytest.mark.usefixtures("short_noise")
def test_both_tenants_are_answered_through_the_front_door(toy, capsys) -> None:
    require_haproxy()
    measured = _measured(["--repository", str(toy.repository), "--door", "--ways", "streams", "overload"], capsys)
    for way in measured.values():
        assert way["alone"]["sent"] == way["beside"]["sent"] == SENT
        assert way["alone"]["in_time"] > 0
        assert set(way["cores"]) == {"clients", "door", "server", "others"} and way["cores"]["server"] > 0
    assert measured["streams"]["noisy"]["answered"] > 0
    assert measured["overload"]["noisy"]["sent"] > 0  # the door may let so few through that none is in time


def _measured(more: list[str], capsys) -> dict:
    try:
        main([*more, *SMALL])
    except SystemExit as ended:  # whether it holds is a matter of time
        assert ended.code == 1
    return json.loads(capsys.readouterr().out)
