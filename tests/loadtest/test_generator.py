"""Loads: what a generator sends and counts, over real connections and in processes of their own."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hplm.errors import HplmError
from loadtest.encode import http_request
from loadtest.generator import Generator, Load
from loadtest.load import Report, send
from loadtest.proxy import make_certificate
from tests.support.fakes import RESET, SILENCE, SmallServer, answer
from tests.support.message import mentioning
from tests.support.wait import Clock

pytestmark = pytest.mark.timeout(300)

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n3\r\n[0]\r\n0\r\n\r\n"  # as a decoder's


def numbered(count: int) -> list[bytes]:
    return [http_request("/", str(number).encode()) for number in range(count)]


def loaded(server: SmallServer, clock: Clock | None = None, **limits: object) -> Report:
    """Sends a load. With a clock, time passes where a server lets it, and while the generator waits to connect again."""
    load = Load(server.url, **({"requests": numbered(5), "patience": 30.0} | limits))
    return Generator(load, clock).run() if clock else load.run()


def test_answers_over_tls_are_read_whole_and_the_client_has_the_address_that_was_asked_for(tmp_path: Path) -> None:
    certificate, pair = make_certificate(tmp_path)
    with SmallServer(lambda number, body: answer(body=body * 100_000), pair=pair) as server:  # of many records
        report = loaded(server, count=20, connections=2, certificate=certificate, sources=["127.0.0.2"], keep_bodies=True)
    assert Counter(report.bodies) == {str(number).encode() * 100_000: 4 for number in range(5)} and not report.failures
    assert server.peers == {"127.0.0.2"}


@pytest.mark.parametrize(
    ("respond", "statuses", "errors", "opened"),
    [
        (lambda number: answer(), {200: 40}, {}, [4]),
        (lambda number: answer(503 if number % 4 == 0 else 200), {200: 30, 503: 10}, {}, [4]),
        (lambda number: RESET if number % 10 == 3 else answer(), {200: 36}, {"reset": 4}, range(4, 9)),  # others may end it
        (lambda number: answer(headers="Connection: close\r\n"), {200: 40}, {}, range(40, 45)),  # announced, so no error
        (lambda number: CHUNKED, {200: 40}, {}, [4]),
        (lambda number: CHUNKED + b"x", {}, {"malformed": 40}, range(40, 45)),
        (lambda number: b"HTTP/1.1 200 OK\r\nContent-Length: no\r\n\r\n", {}, {"malformed": 40}, range(40, 45)),
        (lambda number: answer() + b"x", {}, {"malformed": 40}, range(40, 45)),
    ],
)
def test_a_closed_loop_sends_in_turn_and_counts_each_request_by_what_became_of_it(respond, statuses, errors, opened) -> None:
    """Refusals and errors are no throughput."""
    with SmallServer(lambda number, body: respond(number)) as server:
        report = loaded(server, count=40, connections=4)
    assert (report.by_status, report.errors, report.lost_connections) == (statuses, errors, 0)
    assert Counter(server.bodies) == dict.fromkeys((b"0", b"1", b"2", b"3", b"4"), 8) and server.connections in opened
    assert len(set(report.numbers)) == sum(statuses.values())
    good = report.latencies[report.statuses == 200]
    assert report.succeeded == len(good) and report.req_per_s * report.wall_s == pytest.approx(len(good))
    assert report.percentile_ms(100) == pytest.approx(good.max() * 1e3 if len(good) else np.nan, nan_ok=True)


def test_a_server_that_goes_away_ends_the_load_and_a_missing_one_is_named() -> None:
    def close_after_ten(number: int, body: bytes) -> bytes:
        if number < 10:
            return answer()
        server.listener.close()
        return RESET

    with SmallServer(close_after_ten) as server:
        report = loaded(server, Clock(), count=1000)
    assert (report.by_status, report.errors, report.lost_connections) == ({200: 10}, {"reset": 1}, 1)
    with pytest.raises(HplmError, match=mentioning(server.url)):
        loaded(server)


@pytest.mark.parametrize(
    ("times", "sent"),
    [
        ({"rate": 200.0, "count": 30}, 30),
        ({"arrivals": np.array([0.0, 0.01, 0.011, 0.2, 5.0]), "seconds": 1.0}, 4),  # the last is due after the end
    ],
)
def test_an_open_loop_sends_requests_in_order_and_not_before_they_are_due(times, sent) -> None:
    with SmallServer() as server:
        report = loaded(server, requests=numbered(30), **times)
    assert server.bodies == [str(number).encode() for number in range(sent)] == [b"%d" % number for number in report.numbers]
    assert report.wall_s >= times.get("arrivals", np.arange(30) / 200)[sent - 1]


def test_an_open_loop_counts_the_wait_for_a_slow_server_and_what_it_could_not_send() -> None:
    clock = Clock()

    def after(seconds: float, reply: bytes) -> bytes:
        clock.seconds += seconds
        return reply

    with SmallServer(lambda number, body: after(0.02, answer())) as server:
        report = loaded(server, clock, count=20, rate=1000.0)
    # Request i is due after i ms and answered after 20 (i + 1) ms. A loop that counts from sending would show 20 ms.
    assert report.by_status == {200: 20} and report.numbers.tolist() == list(range(20))
    assert report.latencies == pytest.approx(0.02 * np.arange(1, 21) - 0.001 * np.arange(20))
    assert report.lag_s == pytest.approx(0.02 * 19 - 0.001 * 19)
    with SmallServer(lambda number, body: after(0.35, SILENCE)) as server:
        report = loaded(server, clock, seconds=0.1, rate=100.0, patience=0.3)
    assert report.by_status == {} and report.errors == {"timeout": 2, "unsent": 8}  # the load ends after 0.4 s


@dataclass(frozen=True)
class Doing:
    """A load that sends nothing."""

    what: str
    limit_s: float = 0.1

    def run(self) -> tuple[str, int]:
        if self.what == "refuses":
            raise HplmError("no server")
        if self.what == "dies":
            os._exit(3)
        while self.what == "hangs":
            time.sleep(60)
        return self.what, os.getpid()


@pytest.mark.slow
def test_reports_come_in_the_order_of_the_loads_and_one_that_fails_or_does_not_end_ends_the_others() -> None:
    """Processes start one after the other."""
    (first, one), (second, other) = send(Doing("first"), Doing("second"))
    assert (first, second) == ("first", "second") and len({one, other, os.getpid()}) == 3
    failures = ("refuses", 3600, "no server"), ("dies", 3600, "without a report"), ("hangs", 0.1, "not end within")
    for what, start_s, named in failures:
        with pytest.raises(HplmError, match=named):
            send(Doing("hangs"), Doing(what), start_s=start_s)
