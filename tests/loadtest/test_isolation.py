"""The bookkeeping of the isolation measurement, on real servers and with small numbers. It asserts no times."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from io import BytesIO

import pytest

from hplm.errors import HplmError
from loadtest import isolation, noise
from loadtest.grpc_load import GrpcLoad
from loadtest.isolation import MOST_GROWTH_MB, judged, main
from loadtest.load import send
from loadtest.noise import LARGEST_ALLOWED, OF_STRANGERS
from loadtest.watch import Watch
from tests.deploy.door import require_haproxy
from tests.support.wait import eventually

SENT = 10
OF_ONE_ADDRESS = 64  # the most connections
SLOW = 100  # more than those of one address, and less than those of three
BODIES = 2
MOST_HELD_MB = 2 * BODIES * LARGEST_ALLOWED / 1e6  # Triton may still hold a body when the next one arrives
SMALL = f"--backbone toy --quiet acme --seconds 1 --rate {SENT} --flood 4 --json".split()
NOISY = "--noisy beta --streams 120 --long 2 --characters 150000 --texts 2 --words 500 --text ba".split()  # noqa: SIM905
STRANGERS = f"--door --slow {SLOW} --addresses 3 --body-mb 30 --bodies {BODIES} --text ba".split()


@pytest.fixture
def quick(monkeypatch) -> None:
    """The noise still begins before the quiet tenant's requests."""
    monkeypatch.setattr(isolation, "BEFORE_S", 1.0)
    monkeypatch.setattr(isolation, "AFTER_S", 1.0)


def _quiet(in_time: int, p99_ms: float | None = 10.0) -> dict:
    return {"in_time": in_time, "in_time_share": in_time / 100, "p99_ms": p99_ms}


@pytest.mark.parametrize(
    ("beside", "by_server", "growth", "holds"),
    [
        (_quiet(100, 50.0), 100, (50.0, 50.0), True),
        (_quiet(98, 50.0), 98, (0.0, 0.0), False),  # too few in time
        (_quiet(100, 51.0), 100, (0.0, 0.0), False),  # too slow beside the others
        (_quiet(100, 50.0), 102, (0.0, 0.0), False),  # the server counts too many
        (_quiet(0, None), 0, (0.0, 0.0), False),
        (_quiet(100), 100, (50.1, 0.0), False),
        (_quiet(100), 100, (0.0, 50.1), False),
    ],
)
def test_it_holds_only_if_the_tenant_the_counts_the_memory_and_the_log_do(beside, by_server, growth, holds) -> None:
    grown = dict(zip(("shared_memory", "log"), growth, strict=True))
    assert judged(_quiet(100), beside, {}, by_server, grown, of_strangers=True)["holds"] is holds
    of_tenant = judged(_quiet(100), beside, {}, by_server, grown, of_strangers=False)  # whose requests may take memory
    assert of_tenant["holds"] is (holds or max(growth) > MOST_GROWTH_MB)


def _measured(options: list[str], capsys) -> dict:
    try:
        main([*SMALL, *options])
    except SystemExit as ended:  # whether it holds is a matter of time
        assert ended.code == 1
    return json.loads(capsys.readouterr().out)


def _check(way: dict, most_others: int) -> None:
    for asked in (way["alone"], way["beside"]):
        assert asked["sent"] == SENT
        assert asked["in_time"] <= SENT - sum(asked["not_answered"].values())
    assert 0 <= way["in_time_by_server"] <= SENT + most_others


@pytest.mark.slow
@pytest.mark.server("toy")
@pytest.mark.usefixtures("quick")
def test_every_request_of_both_tenants_is_accounted_for(server, capsys) -> None:
    """Each way to misbehave takes seconds, so two of them."""
    at = server.server
    addresses = ["--url", at.http_url, "--grpc", at.grpc_url, "--metrics", at.metrics_url]
    measured = _measured([*addresses, *NOISY, "--ways", "streams", "overload"], capsys)
    assert set(measured) == {"streams", "overload"}
    for way in measured.values():
        _check(way, way["noisy"].get("sent", 0))
        assert way["noisy"].get("answered", 0) + way["noisy"].get("in_time", 0) > 0
    streams = measured["streams"]["noisy"]
    assert streams["failed"] == 0 and streams["in_flight_at_the_end"] <= 120


@pytest.mark.slow
@pytest.mark.server("toy")
def test_failures_over_grpc_are_counted_and_are_no_throughput(server) -> None:
    load = GrpcLoad(server.grpc_url, "toy", "nobody", ["ba"], in_flight=4, seconds=1.0)
    (report,) = send(load)
    assert report.failed > 0 and report.answered == report.refused == report.cut_off == 0
    with pytest.raises(HplmError, match="toy"):
        report.expect_success("requests to toy")


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_quota_limits_the_noisy_tenant_of_a_server_that_is_started(toy, capsys) -> None:
    ways = ["--ways", "quota", "no_quota", "--quota-rate", "2"]
    measured = _measured(["--repository", str(toy.repository), *NOISY, *ways], capsys)
    assert list(measured) == ["quota", "no_quota"]
    for way in measured.values():
        _check(way, 0)
        assert way["cores"]["server"] > 0 and way["cores"]["clients"] > 0 and "door" not in way["cores"]
    assert measured["quota"]["noisy"]["not_answered"]["status 503"] > 0
    assert measured["no_quota"]["noisy"]["not_answered"] == {}  # taken back


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_strangers_are_refused_and_the_quiet_tenant_is_answered(toy, capsys, monkeypatch) -> None:
    require_haproxy()
    monkeypatch.setattr(noise, "DEADLINE_MS", 60_000)  # however slow this machine is
    measured = _measured(["--repository", str(toy.repository), *STRANGERS], capsys)
    assert set(measured) == set(OF_STRANGERS)
    for way in measured.values():
        _check(way, 0)
        assert way["beside"]["in_time"] > 0 and way["cores"]["door"] >= 0
        assert 0 <= way["shared_memory_growth_mb"] <= MOST_HELD_MB
        assert 0 <= way["log_growth_mb"] <= MOST_GROWTH_MB
    said = {name: way["strangers"] for name, way in measured.items()}
    refusals = {"411", "413", "reset", "closed"}  # whoever still sends may lose the answer
    assert sum(said["body"].get(how, 0) for how in refusals) > 0
    assert set(said["body"]) <= refusals | {"let_in", "refused", "megabytes", "open_at_the_end"}
    assert said["largest"].get("404", 0) > 0, said
    assert said["slow"]["open_at_the_end"] <= OF_ONE_ADDRESS and said["slow"]["refused"] > 0
    assert OF_ONE_ADDRESS < said["slow_from_many"]["open_at_the_end"] <= SLOW
    assert set(said["unknown"]) <= {"404", "503", "reset"} and said["unknown"]["404"] > 0  # cut off where it is fast


@pytest.mark.parametrize(("waiting", "raises"), [("3", True), ("0", False)])
def test_a_server_that_stays_busy_ends_the_measurement(monkeypatch, waiting: str, raises: bool) -> None:
    """Otherwise the next figures of the quiet tenant would not be of it alone."""
    page = f'hplm_waiting_texts{{model="toy"}} {waiting}\n'.encode()
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: BytesIO(page))
    monkeypatch.setattr(isolation, "IDLE_S", 0.1)
    with pytest.raises(HplmError, match="still busy") if raises else nullcontext():
        isolation._wait_until_idle("127.0.0.1:1")


def test_busy_processes_and_ended_ones_are_told_apart_and_growth_is_the_most() -> None:
    python, sizes = [sys.executable, "-S", "-c"], [5_000_000, 1_000_000]
    group = {"start_new_session": True}
    with (
        subprocess.Popen([*python, "while True: pass"], **group) as busy,
        subprocess.Popen(["sleep", "600"], **group) as idle,
    ):
        try:
            with Watch({"busy": busy.pid, "idle": idle.pid}, {"file": lambda: sizes.pop() if sizes else 2_000_000}) as watch:
                eventually(lambda: watch.cores()["busy"] > 0)
                assert watch.cores()["clients"] == 0
                subprocess.run([*python, "import time\nwhile time.process_time() < 1: pass"], check=True)
                cores = watch.cores()
        finally:
            busy.kill()
            idle.kill()
    assert cores["busy"] > 0 and cores["clients"] > 0
    assert cores["idle"] == 0 <= cores["others"]
    assert watch.growth_mb() == {"file": 4.0}
    with pytest.raises(HplmError, match="busy"):
        watch.cores()
