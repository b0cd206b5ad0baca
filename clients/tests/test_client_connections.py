"""The client with servers that are absent, silent, broken or not hPLM's, in plain text and over TLS."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
from contextlib import ExitStack
from threading import Thread

import pytest
from client_fakes import (
    Canned,
    Cutter,
    Dripping,
    Forwarder,
    Silent,
    SlowReader,
    Way,
    before_each_pause,
    free_port,
    generate,
    http,
    infer,
    raising,
    read,
)

from hplm_client import (
    AsyncHplmClient,
    ClientTimeout,
    ConnectionFailed,
    ConnectionLost,
    HplmClient,
    HplmClientError,
    NoBackbone,
    NotConnected,
    Unavailable,
    UnexpectedAnswer,
)
from hplm_client.transports.sockets import is_quiet
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

both = pytest.mark.parametrize("is_async", [False, True])
with_tls = pytest.mark.parametrize("tls", [False, True])
on_both = pytest.mark.parametrize("protocol", ["http", "grpc"])


@pytest.fixture
def before(certificate):
    """A function that puts a Forwarder before a server. Returns it and a client's settings."""
    with ExitStack() as closing:
        yield lambda target, tls: (
            closing.enter_context(Forwarder(target, certificate[1] if tls else None)),
            {"ca_file": certificate[0]} if tls else {},
        )


def test_an_absent_server_is_not_connected(way, monkeypatch):
    pauses = []
    before_each_pause(monkeypatch, lambda: pauses.append(1))
    for backbone, ask in (("minilm", infer), (None, infer), ("minilm", read)):
        pauses.clear()
        with pytest.raises(NotConnected, match=r"127\.0\.0\.1:"):
            way.call(f"127.0.0.1:{free_port()}", ask, backbone=backbone, retries=2)
        assert len(pauses) == 3, "two attempts more, and the decision against a third"
    with pytest.raises(NotConnected, match=r"nosuch\.invalid"):
        way.call("nosuch.invalid:8000", infer, backbone="minilm", retries=0)
    assert way.call(f"127.0.0.1:{free_port()}", lambda client: client.ready()) is False


def test_a_server_that_comes_up_is_found_by_a_retry(way, server, monkeypatch):
    port, started = free_port(), []
    with ExitStack() as closing:
        before_each_pause(
            monkeypatch,
            lambda: started or started.append(closing.enter_context(Forwarder(way.url(server), port=port))),
        )
        answer = way.call(f"127.0.0.1:{port}", infer, backbone="minilm", retries=8)
        assert answer.label == "a" and started[0].connections == 1


def test_a_request_that_may_have_been_taken_is_sent_once(way):
    with Cutter(way.protocol) as cutter:
        with pytest.raises(ConnectionLost):
            way.call(cutter.url, infer, backbone="minilm", retries=5)
        assert cutter.requests == 1


@with_tls
def test_a_silent_server_times_out_without_a_retry(way, certificate, tls):
    trust = {"ca_file": certificate[0]} if tls else {}
    with Silent() as silent:
        with raising(ClientTimeout, match=r"127\.0\.0\.1:\d+"):
            way.call(silent.url, infer, backbone="minilm", network_timeout=0.5, retries=5, **trust)
        eventually(lambda: silent.connections >= 1)
        assert silent.connections == 1
        assert tls or way.call(silent.url, lambda client: client.ready(), network_timeout=0.1) is False


def test_the_search_for_the_backbone_ends_with_the_deadline(way, monkeypatch):
    """Else it would last as long as the test's own time limit."""
    monkeypatch.setattr("hplm_client.retry.GRACE_S", 0.1)
    with Silent() as silent, pytest.raises(ClientTimeout):
        way.call(silent.url, lambda client: client.infer("a", tenant="acme", deadline_ms=50), network_timeout=86_400)


@both
@with_tls
@pytest.mark.parametrize("beginning", [b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"])
def test_a_server_that_answers_byte_by_byte_times_out(before, beginning, is_async, tls):
    with Dripping(beginning) as dripping:
        door, trust = before(dripping.url, tls)
        with raising(ClientTimeout):
            Way("http", is_async).call(door.url, infer, backbone="minilm", network_timeout=0.3, **trust)


@both
def test_a_server_that_reads_piece_by_piece_times_out(before, is_async):
    text = "x" * 60_000_000
    with SlowReader() as slow:
        door, trust = before(slow.url, True)
        with raising(ClientTimeout):
            Way("http", is_async).call(
                door.url, lambda client: client.infer(text, tenant="acme"), backbone="minilm", network_timeout=1.0, **trust
            )
        assert slow.received < 30_000_000


@both
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (http("200 OK", b"<html>hello</html>"), UnexpectedAnswer),
        (http("200 OK", b'{"outputs": []}'), UnexpectedAnswer),
        (http("200 OK", b"[]"), UnexpectedAnswer),
        (http("200 OK", b"[" * 10_000), UnexpectedAnswer),
        (http("200 OK", b"data: 7\n"), UnexpectedAnswer),
        (http("502 Bad Gateway", b"<html>proxy</html>"), Unavailable),
        (http("502 Bad Gateway", b"[]"), Unavailable),
        pytest.param(http("502 Bad Gateway", b"[" * 10_000), Unavailable, id="a deep error page"),
        (b"\0\0\0\4\0\0\0\0\0 not HTTP at all\r\n\r\n", ConnectionLost),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ncut", ConnectionLost),
    ],
)
def test_answers_of_other_servers_are_errors(answer, kind, is_async):
    for ask in (infer, generate, read):
        for backbone in ("minilm", None) if b"outputs" not in answer else ("minilm",):  # which lists no models
            with Canned(answer) as stranger, raising(kind):
                Way("http", is_async).call(stranger.url, ask, backbone=backbone)


@both
@pytest.mark.parametrize(("status", "why"), [("404 Not Found", "[invalid_input] not here"), ("403 Forbidden", "restricted")])
def test_a_server_that_does_not_list_its_models_wants_a_name(is_async, status, why):
    for ask in (infer, generate):
        with Canned(http(status, json.dumps({"error": why}).encode())) as door, pytest.raises(NoBackbone) as caught:
            Way("http", is_async).call(door.url, ask)
        assert status[:3] == "404" or why in str(caught.value)


def test_the_port_of_the_other_protocol_is_not_connected(way, server):
    other = server.grpc_url if way.protocol == "http" else server.http_url
    with pytest.raises(ConnectionFailed):
        way.call(other, infer, backbone="minilm", retries=0, network_timeout=5)


def test_a_silent_address_leaves_time_for_the_next(monkeypatch):
    given, connect = [], socket.socket.connect

    def silent_but_the_last(sock, address):
        given.append(sock.gettimeout())
        if len(given) < 3:
            raise TimeoutError
        connect(sock, address)

    with Canned(http("200 OK", b"")) as server, HplmClient(server.url, network_timeout=1000) as client:
        found = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", server.port))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found] * 3)
        monkeypatch.setattr(socket.socket, "connect", silent_but_the_last)
        assert client.ready()
    assert given == pytest.approx([500, 500, 1000], rel=0.1)


@with_tls
def test_an_idle_connection_that_the_server_closed_is_replaced(before, tls):
    with Canned(http("200 OK", b"")) as once:
        door, trust = before(once.url, tls)
        with HplmClient(door.url, **trust) as client:
            assert client.ready()
            eventually(lambda: not is_quiet(client._transport._idle[-1].sock))
            assert client.ready() and door.connections == 2


@with_tls
@on_both
def test_a_healthy_connection_is_used_again_but_not_by_a_forked_process(server, before, protocol, tls):
    """On a connection of its parent, it would read the parent's answers. gRPC does not survive a fork."""
    door, trust = before(Way(protocol).url(server), tls)
    with HplmClient(door.url, protocol, "minilm", **trust) as client:
        assert [infer(client).label for _ in range(5)] == ["a"] * 5
        assert door.connections == 1
        if protocol == "http":
            child = os.fork()
            if not child:
                os._exit(0 if client.infer("child", tenant="acme").label == "child" else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert infer(client).label == "a" and door.connections == 2


@on_both
def test_threads_that_end_leave_nothing_open(server, protocol):
    def thirty_threads():
        for _ in range(30):
            thread = Thread(target=infer, args=(client,))
            thread.start()
            thread.join()
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with HplmClient(Way(protocol).url(server), protocol, "minilm") as client:
        infer(client)
        assert thirty_threads() >= thirty_threads()


def test_a_closed_client_refuses_calls(way):
    async def use_closed():
        client = AsyncHplmClient("127.0.0.1:1", way.protocol)
        await client.close()
        await client.ready()

    client = HplmClient("127.0.0.1:1", way.protocol)
    client.close()
    with raising(HplmClientError):
        asyncio.run(use_closed()) if way.is_async else infer(client)


@on_both
def test_an_asyncio_client_stays_with_its_loop(server, protocol):
    client = AsyncHplmClient(Way(protocol).url(server), protocol, "minilm")

    async def use_and_keep():
        assert (await infer(client)).label == "a"
        await client._bound[1].close()

    asyncio.run(use_and_keep())
    with raising(HplmClientError):
        asyncio.run(infer(client))


@on_both
def test_a_cancelled_task_leaves_the_client_usable(server, protocol):
    async def cancel_one():
        async with AsyncHplmClient(Way(protocol).url(server), protocol, "minilm") as client:
            task = asyncio.create_task(client.infer(f"meet cancelled-{protocol} 2", tenant="acme"))
            while (await client.infer(f"present cancelled-{protocol}", tenant="acme")).label != "1":
                pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await client.infer(f"meet cancelled-{protocol} 2", tenant="acme")

    assert asyncio.run(cancel_one()).label == f"meet cancelled-{protocol} 2"
