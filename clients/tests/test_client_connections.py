"""The client with servers that are absent, silent, broken or not hPLM's, in plain text and over TLS."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import socket
from contextlib import ExitStack
from threading import Thread

import pytest
from client_fakes import before_each_pause, canned, cutting, forwarding, raising, reading_slowly, refusing, silent
from triton_fakes import PART, echo

from hplm.server.ports import free_ports
from hplm_client import (
    AsyncHplmClient,
    ClientTimeout,
    ConnectionFailed,
    ConnectionLost,
    HplmClient,
    HplmClientError,
    InvalidInput,
    NoBackbone,
    NotConnected,
    NotTrusted,
    Unavailable,
    UnexpectedAnswer,
)
from hplm_client.transports.sockets import is_quiet
from loadtest.proxy import make_certificate
from tests.support.fakes import answer as answer_of
from tests.support.wait import Hold, eventually
from tests.support.ways import Way, generate, infer, read, ready

both = pytest.mark.parametrize("is_async", [False, True])
with_tls = pytest.mark.parametrize("tls", [False, True])
on_both = pytest.mark.parametrize("protocol", ["http", "grpc"])


@pytest.fixture
def before(certificate):
    """A function that puts a server, with TLS or without, before another one. Returns it and a client's settings."""
    with ExitStack() as closing:
        yield lambda target, tls: (
            closing.enter_context(forwarding(target, pair=certificate[1] if tls else None)),
            {"ca_file": certificate[0]} if tls else {},
        )


@pytest.fixture
def pauses(monkeypatch):
    """Has an entry for each time a client has decided whether to retry."""
    pauses = []
    before_each_pause(monkeypatch, lambda: pauses.append(1))
    return pauses


def test_an_absent_server_is_not_connected(way, pauses):
    for backbone, ask in (("minilm", infer), (None, infer), ("minilm", read)):
        pauses.clear()
        with pytest.raises(NotConnected, match=r"127\.0\.0\.1:"):
            way.call(f"127.0.0.1:{free_ports(1)[0]}", ask, backbone=backbone, retries=2)
        assert len(pauses) == 3, "two attempts more, and the decision against a third"
    with pytest.raises(NotConnected, match=r"nosuch\.invalid"):
        way.call("nosuch.invalid:8000", infer, backbone="minilm", retries=0)
    assert way.call(f"127.0.0.1:{free_ports(1)[0]}", ready) is False


def test_a_server_that_comes_up_is_found_by_a_retry(way, fake, monkeypatch):
    port, started = free_ports(1)[0], []
    with ExitStack() as closing:
        start = lambda: started.append(closing.enter_context(forwarding(way.url(fake), port=port)))  # noqa: E731
        before_each_pause(monkeypatch, lambda: started or start())
        assert way.call(f"127.0.0.1:{port}", infer, backbone="minilm", retries=8).label == "a"
        assert started[0].connections == 1


def test_a_request_that_may_have_been_taken_is_sent_once(way):
    requests = []
    with cutting(way.protocol, requests) as cutter, raising(ConnectionLost):
        way.call(cutter.url, infer, backbone="minilm", retries=5)
    assert len(requests) == 1


@with_tls
@pytest.mark.usefixtures("no_grace")
def test_a_silent_server_times_out_without_a_retry(way, certificate, tls):
    trust = {"ca_file": certificate[0]} if tls else {}
    with silent() as server:
        with raising(ClientTimeout, match=r"127\.0\.0\.1:\d+"):
            way.call(server.url, infer, backbone="minilm", network_timeout=0.2, retries=5, **trust)
        eventually(lambda: server.connections >= 1)
        assert server.connections == 1
        if not tls:
            assert way.call(server.url, ready, network_timeout=0.1) is False
            with raising(ClientTimeout):  # the deadline bounds the search for the backbone too
                way.call(server.url, lambda client: infer(client, deadline_ms=50), network_timeout=86_400)


@both
@with_tls
@pytest.mark.parametrize("beginning", [b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"])
def test_a_server_that_answers_byte_by_byte_times_out(before, beginning, is_async, tls):
    with silent(beginning, 0.05) as dripping:
        door, trust = before(dripping.url, tls)
        with raising(ClientTimeout):
            Way("http", is_async).call(door.url, infer, backbone="minilm", network_timeout=0.3, **trust)


@both
def test_a_server_that_reads_piece_by_piece_times_out(before, is_async):
    text, received = "x" * 60_000_000, []
    with reading_slowly(received) as slow:
        door, trust = before(slow.url, True)
        with raising(ClientTimeout):
            settings = {"backbone": "minilm", "network_timeout": 0.5, **trust}
            Way("http", is_async).call(door.url, lambda client: infer(client, text), **settings)
        assert sum(received) < 30_000_000


@both
@with_tls
def test_a_refusal_that_comes_before_all_was_sent_is_heard(certificate, is_async, tls):
    refusal, trust = answer_of(413, b'{"error": "[invalid_input] too large"}'), {"ca_file": certificate[0]} if tls else {}
    with refusing(refusal, pair=certificate[1] if tls else None) as server, raising(InvalidInput, match="too large"):
        call = lambda client: infer(client, "x" * 30_000_000)  # noqa: E731
        Way("http", is_async).call(server.url, call, backbone="minilm", **trust)


@both
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (answer_of(200, b"<html>hello</html>"), UnexpectedAnswer),
        (answer_of(200, b'{"outputs": []}'), UnexpectedAnswer),
        (answer_of(200, b"[]"), UnexpectedAnswer),
        (answer_of(200, b"[" * 10_000), UnexpectedAnswer),
        (answer_of(200, b"data: 7\n"), UnexpectedAnswer),
        pytest.param(answer_of(200, b"x" * 600_000), UnexpectedAnswer, id="a line without an end"),
        (answer_of(502, b"<html>proxy</html>"), Unavailable),
        (answer_of(502, b"[]"), Unavailable),
        pytest.param(answer_of(502, b"[" * 10_000), Unavailable, id="a deep error page"),
        (b"not HTTP at all\r\n\r\n", ConnectionLost),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ncut", ConnectionLost),
    ],
)
def test_answers_of_other_servers_are_errors(answer, kind, is_async):
    for ask in (infer, generate, read):
        for backbone in ("minilm", None) if b"outputs" not in answer else ("minilm",):  # which lists no models
            with canned(answer) as stranger, raising(kind):
                Way("http", is_async).call(stranger.url, ask, backbone=backbone)


@both
@pytest.mark.parametrize(("status", "why"), [(404, "[invalid_input] not here"), (403, "restricted")])
def test_a_server_that_does_not_list_its_models_wants_a_name(is_async, status, why):
    for ask in (infer, generate):
        with canned(answer_of(status, json.dumps({"error": why}).encode())) as door, pytest.raises(NoBackbone) as caught:
            Way("http", is_async).call(door.url, ask)
        assert status == 404 or why in str(caught.value)


def test_a_silent_address_leaves_time_for_the_next(monkeypatch):
    given, connect = [], socket.socket.connect

    def silent_but_the_last(sock, address):
        given.append(sock.gettimeout())
        if len(given) < 3:
            raise TimeoutError
        connect(sock, address)

    with canned(answer_of(200, b"")) as server, HplmClient(server.url, network_timeout=1000) as client:
        found = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", server.port))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found] * 3)
        monkeypatch.setattr(socket.socket, "connect", silent_but_the_last)
        assert client.ready()
    assert given == pytest.approx([500, 500, 1000], rel=0.1)


@with_tls
def test_an_idle_connection_that_the_server_closed_is_replaced(before, tls):
    with canned(answer_of(200, b"")) as once:
        door, trust = before(once.url, tls)
        with HplmClient(door.url, **trust) as client:
            assert client.ready()
            eventually(lambda: not is_quiet(client._made._idle[-1].sock))
            assert client.ready() and door.connections == 2


@with_tls
@on_both
def test_a_healthy_connection_is_used_again_but_not_by_a_forked_process(fake, before, protocol, tls):
    """On a connection of its parent, it would read the parent's answers. gRPC does not survive a fork."""
    door, trust = before(Way(protocol).url(fake), tls)

    async def two():
        async with AsyncHplmClient(door.url, protocol, "minilm", **trust) as client:
            return [await infer(client) for _ in range(2)]

    assert len(asyncio.run(two())) == 2 and door.connections == 1
    with HplmClient(door.url, protocol, "minilm", **trust) as client:
        assert [infer(client).label for _ in range(5)] == ["a"] * 5
        assert door.connections == 2
        if protocol == "http":
            child = os.fork()
            if not child:
                os._exit(0 if infer(client, "child").label == "child" else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert infer(client).label == "a" and door.connections == 3


def open_files():
    return len(os.listdir("/proc/self/fd"))


@on_both
def test_threads_leave_nothing_open_when_they_end_and_a_closed_client_nothing_and_refuses_calls(fake, protocol):
    def many_threads():
        for _ in range(3):
            threads = [Thread(target=infer, args=(client,)) for _ in range(5)]
            for act in (Thread.start, Thread.join):
                for thread in threads:
                    act(thread)

    with HplmClient(Way(protocol).url(fake), protocol, "minilm") as client:
        many_threads()
        during = open_files()
        many_threads()
        assert open_files() <= during + 10, "five connections are as many as were ever used at once"
    gc.collect()
    eventually(lambda: open_files() < during)
    with raising(HplmClientError):
        infer(client)


@on_both
def test_an_asyncio_client_stays_with_its_loop_outlives_a_cancelled_task_and_refuses_calls_once_closed(fake, protocol):
    client, hold = AsyncHplmClient(Way(protocol).url(fake), protocol, "minilm"), Hold()

    def answer(request):
        if request.inputs["TEXT"] == ["held"]:
            hold.pass_through()
        return echo(request)

    async def cancel_and_keep():
        task = asyncio.create_task(infer(client, "held"))
        await asyncio.to_thread(hold.until_reached)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await infer(client)).label == "a"
        with raising(HplmClientError):
            await asyncio.to_thread(lambda: asyncio.run(infer(client)))
        await client.close()
        with raising(HplmClientError):
            await infer(client)

    fake.answer = answer
    with hold:
        asyncio.run(cancel_and_keep())


def test_close_ends_the_calls_that_wait_but_not_those_of_threads_over_http(way, fake):
    hold = Hold()

    async def close_meanwhile(client):
        task = asyncio.create_task(infer(client))
        await asyncio.to_thread(hold.until_reached)
        await client.close()
        if way == Way("http"):
            hold.open()
            assert (await task).label == "a"
        else:
            with raising(ConnectionLost):
                await task

    fake.answer = lambda request: (hold.pass_through(), echo(request))[1]
    with hold:
        way.run(way.url(fake), close_meanwhile, backbone="minilm")


@on_both
def test_close_ends_streams_and_a_cancelled_task_stays_cancelled(fake, protocol):
    async def close_meanwhile():
        client = AsyncHplmClient(Way(protocol).url(fake), protocol, "chat")
        *begun, idle = [client.stream("a", tenant="acme") for _ in range(3)]
        for stream in (*begun, idle):
            await anext(stream)
        waiting, cancelled = (asyncio.ensure_future(anext(stream)) for stream in begun)
        for _ in range(10):
            await asyncio.sleep(0)  # both wait
        cancelled.cancel()
        await client.close()
        for following in (waiting, anext(idle)):
            with raising(ConnectionLost):
                await following
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    fake.parts = [{**PART, "finish_reason": ""}]  # more would come
    asyncio.run(close_meanwhile())


@pytest.fixture
def door(way, fake, before):
    """A server with TLS before the port of the protocol."""
    return before(way.url(fake), True)[0]


def test_answers_come_over_tls(way, door, certificate):
    text, file = "a long text " * 50_000, certificate[0]  # of many records
    for settings in ({"ca_file": file}, {"ca_file": str(file)}):
        use = lambda client: client.infer_batch(["a", text], tenant="acme")  # noqa: E731
        assert [answer.label for answer in way.call(door.url, use, backbone="minilm", **settings)] == ["a", text]
    assert door.connections == 2
    assert way.call(f"https://{door.url}", infer, ca_file=file).label == "a", "the only backbone was found, too"
    assert [piece.text for piece in way.call(door.url, read, backbone="chat", ca_file=file)] == ["a"]


def test_the_certificate_must_be_trusted_and_for_the_name(way, fake, door, certificate, tmp_path, pauses):
    for settings in ({}, {"ca_file": make_certificate(tmp_path)[0]}):
        for call in (infer, ready):
            with raising(NotTrusted, match="--ca-file") as caught:
                way.call(f"https://{door.url}", call, backbone="minilm", **settings)
            assert "certificate" in str(caught.value)
    with (
        forwarding(way.url(fake), pair=certificate[1], host="127.0.0.2") as other,
        pytest.raises(NotTrusted, match=re.escape("127.0.0.2")),
    ):
        way.call(other.url, infer, backbone="minilm", ca_file=certificate[0])
    assert not pauses, "another attempt would find the same certificate"


def test_tls_on_one_side_only_names_the_setting(way, fake, door, certificate):
    with pytest.raises(ConnectionFailed, match="https://"):
        way.call(door.url, infer, backbone="minilm", retries=0)
    assert way.call(door.url, ready) is False
    with canned(answer_of(400, b"")) as plain:
        for url in (fake.http_url, fake.grpc_url, plain.url):
            with pytest.raises(NotConnected, match="https://"):
                way.call(url, infer, backbone="minilm", ca_file=certificate[0], retries=0)


def test_the_port_of_the_other_protocol_is_recognized(way, fake):
    other = Way("grpc" if way.protocol == "http" else "http")
    for call in (infer, ready):
        with raising(InvalidInput, match=f"protocol={other.protocol!r}.*grpc://"):
            way.call(other.url(fake), call, backbone="minilm")
