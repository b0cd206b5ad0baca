"""The client with servers that are absent, silent, broken or not hPLM's."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import tritonclient.grpc
from client_stand_ins import Canned, Cutter, Dripping, Forwarder, Silent, before_each_pause, free_port
from client_ways import Way

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
    Unavailable,
    UnexpectedAnswer,
)
from hplm_client.retry import Attempts
from tests.support.wait import eventually

pytestmark = pytest.mark.slow


def infer(client):
    return client.infer("a", tenant="acme")


def http(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("backbone", ["minilm", None])
def test_a_port_without_a_server_is_not_connected(way, backbone, monkeypatch):
    pauses = []
    before_each_pause(monkeypatch, lambda: pauses.append(1))
    with pytest.raises(NotConnected, match=r"127\.0\.0\.1:"):
        way.call(f"127.0.0.1:{free_port()}", infer, backbone=backbone, retries=2)
    assert len(pauses) == 3, "two attempts more, and the decision against a third"


def test_an_unknown_host_is_not_connected(way):
    with pytest.raises(NotConnected, match=r"nosuch\.invalid"):
        way.call("nosuch.invalid:8000", infer, backbone="minilm", retries=0)


def test_looking_for_the_backbone_is_part_of_the_deadline(way, server, monkeypatch):
    looked = []

    def only(names):
        looked.append(names)
        return "minilm"

    monkeypatch.setattr("hplm_client.wire.only_backbone", only)
    late = partial(Attempts, clock=lambda: time.monotonic() + 30 * bool(looked))
    monkeypatch.setattr("hplm_client.settings.Attempts", late)
    url = server.http_url if way.protocol == "http" else server.grpc_url
    answer = way.call(url, lambda client: client.infer("parameters", tenant="acme", deadline_ms=60_000))
    assert 0 < json.loads(answer.label)["timeout"] <= 30_000_000


def test_a_server_that_comes_up_is_found_by_a_retry(way, server, monkeypatch):
    port, target, started = free_port(), server.http_url if way.protocol == "http" else server.grpc_url, []
    before_each_pause(monkeypatch, lambda: started or started.append(Forwarder(port, target)))
    answer = way.call(f"127.0.0.1:{port}", infer, backbone="minilm", retries=8)
    assert answer.label == "a" and started[0].connections == 1
    started[0].__exit__()


def test_a_request_that_may_have_been_taken_is_sent_once(way):
    with Cutter(way.protocol) as cutter:
        with pytest.raises(ConnectionLost):
            way.call(cutter.url, infer, backbone="minilm", retries=5)
        assert cutter.requests == 1


def test_a_silent_server_times_out_without_a_retry(way):
    with Silent() as silent:
        with pytest.raises(ConnectionFailed, match=r"(?=.*127\.0\.0\.1:\d+)(?=.*\b[01](\.\d+)? s)") as caught:
            way.call(silent.url, infer, backbone="minilm", network_timeout=1.0, retries=5)
        assert type(caught.value) is ClientTimeout
        eventually(lambda: silent.connections >= 1)
        assert silent.connections == 1
        assert way.call(silent.url, lambda client: client.ready(), network_timeout=0.1) is False


def test_the_search_for_the_backbone_ends_with_the_deadline(way, monkeypatch):
    """Else it would last as long as the test's own time limit."""
    monkeypatch.setattr("hplm_client.retry.GRACE_S", 0.1)
    with Silent() as silent, pytest.raises(ClientTimeout):
        way.call(silent.url, lambda client: client.infer("a", tenant="acme", deadline_ms=50), network_timeout=86_400)


@pytest.mark.parametrize("beginning", [b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_server_that_answers_byte_by_byte_times_out(beginning, is_async):
    with Dripping(beginning) as server, pytest.raises(ConnectionFailed) as caught:
        Way("http", is_async).call(server.url, infer, backbone="minilm", network_timeout=0.3)
    assert type(caught.value) is ClientTimeout


def test_an_absent_server_is_not_ready(way):
    assert way.call(f"127.0.0.1:{free_port()}", lambda client: client.ready()) is False


@pytest.mark.parametrize(
    ("answer", "kind", "named"),
    [
        (http("200 OK", b"<html>hello</html>"), UnexpectedAnswer, "127.0.0.1"),
        (http("200 OK", b'{"outputs": []}'), UnexpectedAnswer, "LABEL"),
        (http("502 Bad Gateway", b"<html>proxy</html>"), Unavailable, "<html>proxy</html>"),
        (b"\0\0\0\4\0\0\0\0\0 not HTTP at all\r\n\r\n", ConnectionLost, "127.0.0.1"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ncut", ConnectionLost, "127.0.0.1"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_answers_of_other_http_servers_are_errors(answer, kind, named, is_async):
    with Canned(answer) as stranger, pytest.raises(kind, match=named) as caught:
        Way("http", is_async).call(stranger.url, infer, backbone="minilm")
    assert type(caught.value) is kind


@pytest.mark.parametrize("is_async", [False, True])
def test_a_server_that_does_not_list_its_models_wants_a_name(is_async):
    refused = http("404 Not Found", b'{"error":"[invalid_input] only inference and health are served here"}')
    for ask in (infer, lambda client: client.generate("a", tenant="acme")):
        with Canned(refused) as door, pytest.raises(NoBackbone, match="--backbone"):
            Way("http", is_async).call(door.url, ask)


def test_a_stream_that_has_failed_before_its_request_gives_its_own_error(monkeypatch):
    send = tritonclient.grpc.InferenceServerClient.async_stream_infer

    def late(client, *arguments, **more):
        eventually(lambda: not client._stream._active)
        send(client, *arguments, **more)

    monkeypatch.setattr(tritonclient.grpc.InferenceServerClient, "async_stream_infer", late)
    with HplmClient(f"127.0.0.1:{free_port()}", "grpc", "minilm", retries=0) as client, pytest.raises(NotConnected):
        list(client.stream("a", tenant="acme"))


def test_the_port_of_the_other_protocol_is_not_connected(way, server):
    other = server.grpc_url if way.protocol == "http" else server.http_url
    with pytest.raises(ConnectionFailed):
        way.call(other, infer, backbone="minilm", retries=0, network_timeout=5)


@pytest.mark.parametrize(("answers_at", "shares"), [(2, (0.5, 0.5, 1.0)), (1, (0.5, 0.5)), (None, (0.5, 0.5, 1.0))])
def test_a_silent_address_leaves_time_for_the_next(answers_at, shares, monkeypatch):
    given, connect = [], socket.socket.connect

    def silent_but_one(sock, address):
        given.append(sock.gettimeout())
        if len(given) - 1 != answers_at:
            raise TimeoutError
        connect(sock, address)

    with Canned(http("200 OK", b"")) as server, HplmClient(server.url, network_timeout=1000) as client:
        host, port = server.url.split(":")
        found = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, int(port)))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found] * 3)
        monkeypatch.setattr(socket.socket, "connect", silent_but_one)
        assert client.ready() == (answers_at is not None)
    assert given == pytest.approx([1000 * share for share in shares], rel=0.1)


def test_an_idle_connection_that_the_server_closed_is_replaced():
    with Canned(http("200 OK", b"")) as server, HplmClient(server.url) as client:
        assert client.ready()
        assert server.closed.wait(10)
        assert client.ready() and server.connections == 2


def test_a_healthy_connection_is_used_again(server):
    port = free_port()
    with Forwarder(port, server.http_url) as forwarder, HplmClient(forwarder.url, backbone="minilm") as client:
        assert [infer(client).label for _ in range(5)] == ["a"] * 5
        assert forwarder.connections == 1


def test_a_forked_process_has_connections_of_its_own(server):
    """On a connection of its parent, it would read the parent's answers."""
    port = free_port()
    with Forwarder(port, server.http_url) as forwarder, HplmClient(forwarder.url, backbone="minilm") as client:
        assert infer(client).label == "a"
        child = os.fork()
        if not child:
            os._exit(0 if client.infer("child", tenant="acme").label == "child" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert infer(client).label == "a"
        assert forwarder.connections == 2


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_threads_that_end_leave_nothing_open(server, protocol):
    url = server.http_url if protocol == "http" else server.grpc_url

    def thirty_threads():
        for _ in range(30):
            thread = Thread(target=infer, args=(client,))
            thread.start()
            thread.join()
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with HplmClient(url, protocol, "minilm") as client:
        infer(client)
        assert thirty_threads() >= thirty_threads()


def test_close_closes_pooled_connections(server):
    with HplmClient(server.http_url, backbone="minilm") as client, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: client.infer("meet closing 8", tenant="acme"), range(8)))
        eventually(lambda: established(server.http_url) == 8)
        assert established(server.http_url) == 8
    eventually(lambda: established(server.http_url) == 0)
    assert established(server.http_url) == 0


def established(url: str) -> int:
    """Returns this machine's connections to the port, from the kernel."""
    port = f":{int(url.rpartition(':')[2]):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[2].endswith(port) and line.split()[3] == "01" for line in lines)


def test_a_closed_client_refuses_calls(way):
    if way.is_async:

        async def use_closed():
            client = AsyncHplmClient("127.0.0.1:1", way.protocol)
            await client.close()
            await client.ready()

        with pytest.raises(HplmClientError) as caught:
            asyncio.run(use_closed())
    else:
        client = HplmClient("127.0.0.1:1", way.protocol)
        client.close()
        with pytest.raises(HplmClientError) as caught:
            infer(client)
    assert type(caught.value) is HplmClientError


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_asyncio_client_stays_with_its_loop(server, protocol):
    client = AsyncHplmClient(server.http_url if protocol == "http" else server.grpc_url, protocol, "minilm")

    async def use_and_keep():
        assert (await infer(client)).label == "a"
        await client._bound[1].close()

    asyncio.run(use_and_keep())
    with pytest.raises(HplmClientError) as caught:
        asyncio.run(infer(client))
    assert type(caught.value) is HplmClientError


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_cancelled_task_leaves_the_client_usable(server, protocol):
    async def cancel_one():
        url = server.http_url if protocol == "http" else server.grpc_url
        async with AsyncHplmClient(url, protocol, "minilm") as client:
            task = asyncio.create_task(client.infer("sleep 1", tenant="acme"))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await infer(client)

    assert asyncio.run(cancel_one()).label == "a"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"url": "http://127.0.0.1:8000"}, "'http://127.0.0.1:8000'"),
        ({"url": "127.0.0.1"}, "'127.0.0.1'"),
        ({"url": "127.0.0.1:port"}, "'127.0.0.1:port'"),
        ({"url": "127.0.0.1:8000/path"}, "'127.0.0.1:8000/path'"),
        ({"protocol": "https"}, "'https'"),
        ({"api_key": "two\nlines"}, "ASCII"),
        ({"api_key": "schlüssel"}, "ASCII"),
        ({"api_key": ""}, "ASCII"),
        ({"network_timeout": 0}, "network_timeout 0"),
        ({"network_timeout": float("inf")}, "network_timeout inf"),
        ({"retries": -1}, "retries -1"),
    ],
)
@pytest.mark.parametrize("kind", [HplmClient, AsyncHplmClient])
def test_wrong_settings_are_refused_at_once(kind, settings, named):
    with pytest.raises(InvalidInput, match=re.escape(named)) as caught:
        kind(**{"url": "127.0.0.1:8000", **settings})
    assert "schl" not in str(caught.value), "a key does not belong into a message"


def test_the_key_is_not_shown():
    from hplm_client.settings import Settings

    assert "s3cret" not in repr(Settings("127.0.0.1:8000", api_key="s3cret"))
