"""Limits of addresses, tenants and sizes at the front door: a real HAProxy before stand-ins for Triton, which hold requests."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import grpc
import pytest

from hplm_client.errors import HplmClientError, InvalidInput, QueueFull, QuotaExceeded
from tests.cluster.front import GENERATE, HOST, INFER
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

LOUD, QUIET = "loud", "quiet"
HELD, MEDIUM, LARGE = 1000, 60_000, 200_000  # bytes: held by the stand-ins; more than the door's buffer; large
OF_ADDRESS, OF_TENANT = 8, 64  # requests in flight that nobody is refused for
FORGER, OTHER = "127.0.0.2", "127.0.0.200"
SOURCES = [f"127.0.0.{number}" for number in range(2, 10)]
ONE = {"HPLM_AT_ONCE": 1, "HPLM_FEW_AT_ONCE": 0, "HPLM_WAITING": 2, "HPLM_MEDIUM_AT_ONCE": 2, "HPLM_LATE": 1000}
ONE |= {"HPLM_LARGE": LARGE, "HPLM_LARGE_AT_ONCE": 2}
STRICT = {"HPLM_REQUESTS": 20, "HPLM_IN_FLIGHT": 4, "HPLM_CONNECTIONS": 8}
COUNTS = ("gpc1_rate", "gpc0_rate")  # of an address: requests that were let in, and refused ones
NOTHING = b"GET /v2/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def clients(held):
    with ThreadPoolExecutor(OF_TENANT + 2) as clients:
        yield clients
        held.release()


def all_answered(held, asked):
    held.release()
    return [one.result(PATIENCE) for one in asked] == [None] * len(asked)


@pytest.mark.parametrize(
    ("tenant", "way", "sources"),
    [(None, "json", FORGER), *((LOUD, way, SOURCES) for way in ("json", "header", "binary", "metadata"))],
    ids=lambda value: str(value)[:9],
)
def test_a_flood_of_an_address_or_a_tenant_keeps_no_other_waiting(opened, held, clients, tenant, way, sources):
    door, asked = opened(**ONE), []
    backend = "grpc" if way == "metadata" else "http"
    for number in range(4):
        source = sources if tenant is None else sources[number]
        asked.append(clients.submit(door.infer, tenant, source, HELD, way))
        eventually(lambda: held.count == 1 and door.waiting(backend) == len(asked) - 1)
        assert tenant is None or door.in_flight(LOUD) == len(asked)
    asked.append(clients.submit(door.infer, tenant and QUIET, OTHER, 2 * HELD, way))
    eventually(lambda: door.waiting(backend) == 4)
    assert len(held.sizes) == 1 and (tenant is None or door.in_flight(QUIET) == 1)
    assert all_answered(held, asked)
    if way != "metadata":  # where all come from one address
        assert held.sizes[1] == max(held.sizes), "the last one came second"


@pytest.mark.parametrize(("tenant", "way"), [(None, "json"), (None, "metadata"), (LOUD, "header")])
def test_when_many_wait_an_address_or_a_tenant_with_many_is_refused_and_no_other(opened, held, clients, tenant, way):
    door, backend = opened(**ONE | {"HPLM_AT_ONCE": 2}), "grpc" if way == "metadata" else "http"
    sources = SOURCES if tenant else [HOST if way == "metadata" else FORGER]
    asked = [clients.submit(door.infer, tenant, source, HELD, way) for source in sources * OF_ADDRESS]
    eventually(lambda: held.count == 2 and door.waiting(backend) == len(asked) - 2)
    for again in ("header", "json", "binary") if tenant else (way,):
        refused = door.infer(tenant, OTHER if tenant else sources[0], HELD, again)
        assert isinstance(refused, QueueFull) and refused.retry_after_s == 1 and (not tenant or "tenant" in str(refused))
    if way != "metadata":  # where all come from one address
        asked.append(clients.submit(door.infer, tenant and QUIET, OTHER, HELD))
        eventually(lambda: door.waiting(backend) == len(asked) - 2)
    assert not any(one.done() for one in asked)
    assert all_answered(held, asked)
    eventually(lambda: not tenant or door.in_flight(tenant) == 0)
    assert door.infer(tenant, sources[0], HELD, way) is None


def test_tenants_with_few_requests_have_places_of_their_own(opened, held, clients):
    door, asked = opened(**ONE | {"HPLM_WAITING": 256, "HPLM_FEW_AT_ONCE": 1}), []
    for number in range(OF_ADDRESS + 2):
        asked.append(clients.submit(door.infer, LOUD, SOURCES[number // 2], HELD))
        eventually(lambda: door.in_flight(LOUD) == len(asked))
    eventually(lambda: held.count == 2)
    held.answer_first()  # of a tenant that had few then
    eventually(lambda: door.in_flight(LOUD) == OF_ADDRESS + 1)
    asked.append(clients.submit(door.infer, LOUD, OTHER, HELD))
    eventually(lambda: door.in_flight(LOUD) == OF_ADDRESS + 2)
    assert door.infer(QUIET, OTHER) is None, "answered before those that wait"
    assert held.count == 1 and sum(one.done() for one in asked) == 1
    assert all_answered(held, asked)


@pytest.mark.parametrize("way", ["json", "metadata"])
def test_a_tenant_that_the_server_often_refuses_for_deadlines_is_refused_by_the_door_and_no_other(opened, held, clients, way):
    door = opened(HPLM_LATE=0)
    held.release()

    def errors(tenant):
        return [str(one) for one in clients.map(partial(door.infer, tenant, way=way), SOURCES)]

    held.refusal = "[deadline] it would take longer"
    eventually(lambda: any("[queue_full]" in error for error in errors(LOUD)))
    assert held.refusal in str(door.infer(QUIET, way=way))
    held.refusal = "[quota] too many"
    for _ in range(4):
        assert all(held.refusal in error for error in errors("often"))


@pytest.mark.parametrize("way", ["json", "metadata"])
def test_a_deadline_counts_from_the_arrival_of_a_request_that_waits_whatever_its_client_says(opened, held, clients, way):
    door = opened(**ONE)
    ahead = clients.submit(door.infer, None, FORGER, HELD, way)
    eventually(lambda: held.count == 1)
    forged = {"metadata": [("hplm-arrived", "1")]} if way == "metadata" else {"hplm_arrived": "1"}
    before = time.time_ns() // 1000
    late = clients.submit(door.infer, None, OTHER, HELD, way, **forged)
    eventually(lambda: door.waiting("grpc" if way == "metadata" else "http") == 1)
    waited = time.time_ns() // 1000
    assert all_answered(held, [ahead, late])
    assert before <= int(held.headers[-1]["hplm-arrived"]) <= waited


def test_of_one_address_only_a_few_requests_count_for_a_tenant(opened, held, clients):
    """An attacker gains few places by another tenant's name."""
    forged, door = 30, opened(**ONE | {"HPLM_WAITING": 256})
    asked = [clients.submit(door.infer, QUIET, FORGER, HELD, "header") for _ in range(OF_ADDRESS)]
    eventually(lambda: door.in_flight(QUIET) == OF_ADDRESS)
    asked += [clients.submit(door.infer, QUIET, FORGER, HELD, "header") for _ in range(forged - OF_ADDRESS)]
    eventually(lambda: door.in_flight(f".*{FORGER}", "more_of_address") == forged - OF_ADDRESS)
    assert door.in_flight(QUIET) == OF_ADDRESS
    asked.append(clients.submit(door.infer, QUIET, OTHER, 2 * HELD, "header"))
    eventually(lambda: door.in_flight(QUIET) == OF_ADDRESS + 1)
    assert all_answered(held, asked)
    assert held.sizes.index(max(held.sizes)) <= OF_ADDRESS + 1, "only those that count, and one as early, come before"


def test_names_that_no_tenant_has_are_not_counted(opened):
    door = opened(**ONE)
    for name in ("Loud", "a b", "-", "x" * 65, ""):
        assert door.infer(name) is door.infer(name, way="header") is None
    for body in (b"[" * 5000, b'{"parameters":{"tenant":["a"]}}', b'{"parameters":"a"}'):
        assert door.post(INFER, body, OTHER).status in (200, 400)
    assert "key=" not in door.socket.ask("show table tenants_in_flight")
    assert door.infer(QUIET) is None and "key=quiet" in door.socket.ask("show table tenants_in_flight")
    assert door.post(GENERATE, b'{"TEXT":"a","tenant":"loud"}').status == 200
    assert "key=loud" in door.socket.ask("show table tenants_in_flight")


@pytest.mark.parametrize(("size", "way", "many"), [(MEDIUM, "json", 16), (LARGE, "json", 2), (LARGE, "metadata", 2)])
def test_one_address_has_only_so_many_of_a_size_on_their_way(opened, held, clients, size, way, many):
    door = opened(**ONE)
    asked = [clients.submit(door.infer, None, HOST, size, way) for _ in range(many)]
    table = "medium_addresses" if size == MEDIUM else "large_addresses"
    eventually(lambda: held.count == 2 and door.in_flight(".*127.0.0.1", table) == many)
    beside = clients.submit(door.infer, None, HOST, size, way)
    backend = "large_grpc" if way == "metadata" else "large" if size == LARGE else "medium"
    eventually(lambda: beside.done() or door.waiting(backend) > many - 2)
    assert beside.done(), "it waits"
    refused = beside.result()
    assert isinstance(refused, HplmClientError) and ("429" in str(refused) or isinstance(refused, QuotaExceeded)), refused
    assert door.infer(way=way) is None, "a small one"
    assert all_answered(held, asked)


def test_who_waits_too_long_is_refused_and_small_requests_pass_large_ones(opened, held, clients):
    door = opened(HPLM_PATIENCE="3s", **ONE)
    large = [clients.submit(door.infer, None, source, LARGE) for source in SOURCES[:4]]
    eventually(lambda: held.count == 2 and door.waiting("large") + sum(one.done() for one in large) == 2)
    assert [door.infer() for _ in range(3)] == [None] * 3 and held.count == 2
    small = [clients.submit(door.infer, None, source, HELD) for source in SOURCES[:2]]
    for asked in (large, small):
        eventually(lambda: sum(one.done() for one in asked) == len(asked) // 2)  # noqa: B023
        refused = [one.result() for one in asked if one.done()]
        assert all(
            one.retry_after_s == 1 and mentions(one, "[queue_full]" if asked is large else "[draining]") for one in refused
        )
    assert all_answered(held, [one for one in large + small if not one.done()])


def test_one_address_has_so_many_requests_in_flight(opened, held, clients):
    door = opened(**STRICT)
    asked = [clients.submit(door.infer, None, size=HELD, way="metadata") for _ in range(4)]
    eventually(lambda: held.count == 4)
    for way in ("metadata", "json"):
        refused = door.infer(way=way)
        assert isinstance(refused, QuotaExceeded) and refused.retry_after_s in (1, 2)
    assert door.infer(source=OTHER) is None
    assert all_answered(held, asked)
    eventually(lambda: door.infer() is None)


def answers(door, times, request=NOTHING):
    """Returns the answers to requests on one connection, one after the other, until the door closes it."""
    received = []
    with door.connect() as connection, suppress(OSError):
        for _ in range(times):
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b"}"):
                piece = connection.recv(1 << 16)
                if not piece:
                    return received
                answer += piece
            received.append(answer.decode().removeprefix("HTTP/1.1 "))
    return received


def test_a_refusal_says_when_to_come_again(opened):
    """At most as many clients get the same retry time as may come in one second, and no retry time is over 10 s."""
    door = opened(**STRICT)
    said = answers(door, 80)
    assert all(answer.startswith("404") for answer in said[:20])
    refused = [answer for answer in said[20:] if answer.startswith("429")]
    waits = [int(re.search(r"retry-after: (\d+)", answer)[1]) for answer in refused]
    assert all(f"retry after {wait} s" in answer for wait, answer in zip(waits, refused, strict=True))
    assert len(refused) == 60 and waits == [min(10, 1 + number // 2) for number in range(1, 61)]
    error = door.infer(way="metadata")
    assert isinstance(error, QuotaExceeded) and error.retry_after_s == 10
    assert door.post("/v1/completions").status == 429
    assert door.infer(source=OTHER) is None
    # If refused requests counted too, none would ever be let in again.
    table = door.socket.ask("show table door")
    let_in, refused = (int(re.search(rf"{HOST} .*{count}\(\d+\)=(\d+)", table)[1]) for count in COUNTS)
    assert (let_in, refused) == (20, 62)


@pytest.mark.parametrize(
    ("said", "status", "wait"),
    [
        ("[quota] tenant 'loud' sends too many requests; retry after 7 s", 429, "7"),
        ("[quota] too much", 429, None),
        ("[queue_full] too many texts wait; retry after 12 s", 503, "12"),
        ("[deadline] the answer '[quota]' takes too long", 503, None),
    ],
)
def test_a_quota_of_the_server_comes_as_429_and_each_refusal_says_when_to_come_again(opened, held, said, status, wait):
    door = opened()
    held.refusal = said
    answer = door.ask(LOUD)
    found = re.findall(r"retry-after: (.*)\r", answer.head)
    assert (answer.status, answer.error, found) == (status, said, [wait] if wait else [])
    refused = door.infer(LOUD, way="metadata")
    assert said in str(refused), "over gRPC it stays as it is"


def test_an_address_that_does_not_wait_is_cut_off(opened):
    door = opened(HPLM_REQUESTS=10, HPLM_REFUSED=50)
    assert len(answers(door, 1000)) == 10 + 51
    with pytest.raises(OSError):
        door.connect()  # the handshake already
    assert door.infer(source=OTHER) is None
    assert door.log.read_text().count("127.0.0.1:") == 0, "it leaves no lines in the log"


def test_one_address_has_and_makes_so_many_connections(opened):
    door = opened(HPLM_HANDSHAKES=10)
    found = [lets_in(door) for _ in range(20)]
    assert found == [True] * 10 + [False] * 10 and lets_in(door, OTHER)
    door, others = opened(**STRICT), []
    for _ in range(16):
        with suppress(ConnectionResetError):  # some are refused, which may show at once
            others.append(door.knock())
    eventually(lambda: not lets_in(door))
    for connection in others:
        connection.close()
    eventually(lambda: lets_in(door))


def lets_in(door, source=HOST):
    try:
        return door.send("GET", "/v2/nothing", source=source).status in (404, 503)
    except (OSError, AssertionError):  # no connection, or no answer on it
        return False


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"compression": grpc.Compression.Gzip}, ["compression"]),
        ({"metadata": [("content-encoding", "gzip")]}, ["Content-Encoding"]),
        ({"metadata": [("authorization", "a" * 10_000)]}, ["8"]),
    ],
)
def test_requests_of_grpc_are_refused_with_a_status_of_grpc_and_our_word(opened, more, words):
    error = opened().infer(way="metadata", **more)
    assert isinstance(error, InvalidInput) and error.status == 400 and mentions(error, *words), error


def test_failing_requests_fill_no_log(opened, held):
    door = opened()
    held.refusal = "[internal] always"
    lines = len(door.log.read_text().splitlines())
    request = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nnull".encode()
    assert len([one for one in answers(door, 500, request) if "503" in one[:14]]) == 500
    assert len(door.log.read_text().splitlines()) - lines == 101
