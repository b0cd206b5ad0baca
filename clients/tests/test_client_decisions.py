"""Decisions without a server: refused settings, the class of a refusal, and the pauses between attempts."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta

import pytest

import hplm_client
from hplm_client import AsyncHplmClient, HplmClient, InvalidInput, QueueFull
from hplm_client.errors import refusal
from hplm_client.retry import FIRST_PAUSE_S, GRACE_S, LONGEST_PAUSE_S, Attempts
from hplm_client.settings import ClientSettings
from hplm_client.waiting import within
from tests.support.wait import Clock


@pytest.mark.parametrize("kind", [HplmClient, AsyncHplmClient])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *(({"url": url}, url.removeprefix("https://")) for url in (
            "http://127.0.0.1:8000", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:8000/path", "https://door/path", "https://door:x",
            "HTTPS:door:443", "a..b:80", f"{'a' * 64}:80",
        )),
        ({"url": "https://"}, "':443'"),
        ({"protocol": "https"}, "'https'"),
        *(({"api_key": key}, "ASCII") for key in ("two\nlines", "schlüssel", "", 7)),
        ({"network_timeout": 0}, "network_timeout is 0"),
        *(({"network_timeout": seconds}, "1,000,000 at most") for seconds in (
            float("inf"), float("nan"), 1e12, 1_000_001, timedelta(seconds=1), "1", None)),
        ({"backbone": "\ud800"}, "backbone"),
        *(({"retries": number}, f"retries is {number}") for number in (-1, 1.5, None)),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(kind, settings, named):
    with pytest.raises(InvalidInput, match=re.escape(named)) as caught:
        kind(**{"url": "127.0.0.1:8000", **settings})
    assert "schl" not in str(caught.value), "a key does not belong into a message"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_file_that_holds_no_certificate_is_refused(protocol, tmp_path):
    no_certificate = tmp_path / "key.pem"
    no_certificate.write_text("-----BEGIN PRIVATE KEY-----\n")
    for path in (tmp_path / "missing.pem", no_certificate, tmp_path):
        for kind in (HplmClient, AsyncHplmClient):
            with pytest.raises(InvalidInput, match=re.escape(str(path))):
                kind("127.0.0.1:443", protocol, ca_file=path)


@pytest.mark.parametrize("tenant", [None, 7, "", "a b", "é", "a\r\nx: y"])
def test_a_name_that_is_no_value_of_a_header_is_not_sent_in_one(tenant):
    key = {"authorization": "Bearer K3Y"}
    assert ClientSettings("a:1", api_key="K3Y").headers({"tenant": tenant} if tenant is not None else {}) == key


@pytest.mark.parametrize(
    ("message", "told", "kind", "status"),
    [
        ("[request id: 7] [no_tenant] words [quota]", None, "NoTenant", 404),
        ("[no_tenant] by Triton's generate", "400", "NoTenant", 404),
        ("[quota] by the front door", "429", "QuotaExceeded", 429),
        ("[queue_full]", "StatusCode.UNAVAILABLE", "QueueFull", 503),
        ("input 'TEXT' data-type is 'FP32'", "400", "InvalidInput", 400),
        ("too large", "413", "InvalidInput", 413),
        ("batch-size must be <= 1024", "StatusCode.INVALID_ARGUMENT", "InvalidInput", 400),
        ("Request for unknown model: 'x' is not found", "404", "NoBackbone", 404),
        ("Request for unknown model: 'x' is not found", "StatusCode.NOT_FOUND", "NoBackbone", 404),
        ("Request for unknown model: 'x' is not found", None, "NoBackbone", 404),
        ("who are you", "401", "Forbidden", 401),
        ("no", "StatusCode.PERMISSION_DENIED", "Forbidden", 403),
        ("This API is restricted, expecting header 'x'", "403", "Forbidden", 403),
        ("This protocol is restricted, expecting header 'x'", "StatusCode.UNAVAILABLE", "Forbidden", 403),
        ("Exceeds maximum queue size", "503", "Unavailable", 503),
        ("bad gateway", "502", "Unavailable", 502),
        ("[another_word] yet unknown", "503", "Unavailable", 503),
        ("Server is stopping", "StatusCode.UNAVAILABLE", "Unavailable", 503),
        ("Stub process 'x' is not healthy", "500", "ServerFault", 500),
        ("Stub process 'x' is not healthy", "StatusCode.INTERNAL", "ServerFault", 500),
        ("no status at all", None, "ServerFault", None),
        ("failed to connect to all addresses; last error: ...", "StatusCode.UNAVAILABLE", "NotConnected", None),
        ("errors resolving nosuch.invalid:1: [...]", "StatusCode.UNAVAILABLE", "NotConnected", None),
        ("Stream removed (Socket closed)", "StatusCode.UNAVAILABLE", "ConnectionLost", None),
        ("Stream removed (Data frame with END_STREAM flag received)", "StatusCode.UNKNOWN", "ConnectionLost", None),
        ("Channel closed!", "StatusCode.CANCELLED", "ConnectionLost", 499),
    ],
)
def test_the_word_of_an_error_or_its_status_chooses_the_exception(message, told, kind, status):
    error = refusal(message, told)
    assert type(error) is getattr(hplm_client, kind) and error.status == status and str(error) == message


def test_retry_hints_are_read():
    hints = {"retry after 0.2 s": 0.2, "Retry after 50ms.": 0.05, "retry after 3 s, or add a replica": 3.0}
    hints |= {"try later": None, "retry after 5 minutes": None}
    assert {said: refusal(f"[queue_full] 4,096 texts wait; {said}", "503").retry_after_s for said in hints} == hints


def attempts(retries=10, deadline_ms=None, network_timeout=60.0, clock=None, die=1.0):
    return Attempts(retries, deadline_ms, network_timeout, (clock or Clock()).monotonic, lambda: die)


FULL, HINTED = QueueFull("full"), QueueFull("[queue_full] retry after 0.2 s")


def test_pauses_double_up_to_a_limit_differ_between_clients_and_keep_to_the_hint():
    series = attempts()
    pauses = [series.pause_s(FULL) for _ in range(8)]
    assert pauses == [min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S) for number in range(8)]
    assert [attempts(die=die).pause_s(FULL) / FIRST_PAUSE_S for die in (0.0, 0.5)] == pytest.approx([0.5, 0.75])
    assert [attempts(die=die).pause_s(HINTED) for die in (0.0, 1.0)] == pytest.approx([0.2, 0.3])


@pytest.mark.parametrize("limit", [{"deadline_ms": 100}, {"network_timeout": 0.1}])
def test_a_pause_that_would_outlast_the_deadline_is_not_started(limit):
    clock = Clock()
    series = attempts(clock=clock, **limit)
    clock.seconds += 0.04
    assert series.pause_s(FULL) == FIRST_PAUSE_S
    clock.seconds += 0.05
    with pytest.raises(QueueFull):
        series.pause_s(QueueFull("[queue_full] retry after 11 ms"))


def test_every_attempt_gets_the_rest_of_the_deadline():
    clock = Clock()
    series, endless = attempts(deadline_ms=50, clock=clock), attempts(network_timeout=1.0, clock=clock)
    assert (series.timeout_us, endless.timeout_us, endless.network_s) == (50_000, None, 1.0)
    assert series.network_s == pytest.approx(0.05 + GRACE_S)
    clock.seconds += 0.03
    assert series.timeout_us == 20_000 and endless.network_s == pytest.approx(0.97)
    clock.seconds += 0.02 + GRACE_S / 4
    assert series.timeout_us == 1, "0 would mean the tenant's default to the server"
    assert series.network_s == pytest.approx(0.75 * GRACE_S), "the grace is one for all of them"
    clock.seconds += GRACE_S
    assert series.network_s == 0.0


def test_a_cancelling_that_comes_with_the_result_is_not_lost():
    """A stream whose next part has just come must end too when its reader is cancelled."""

    async def run():
        part = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(within(part, 60))
        await asyncio.sleep(0)  # it waits
        part.set_result("a part")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(run())
