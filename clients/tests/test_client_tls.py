"""The client over TLS, with a real Triton behind a server that speaks it."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from client_stand_ins import Canned, Dripping, Silent, StandIn, before_each_pause
from client_ways import Way
from tls_stand_ins import TlsForwarder, certificate_and_pair

from hplm_client import (
    AsyncHplmClient,
    ClientTimeout,
    ConnectionFailed,
    HplmClient,
    HplmClientError,
    InvalidInput,
    NotConnected,
    NotTrusted,
)
from hplm_client.settings import Settings
from hplm_client.transports.sockets import is_quiet
from tests.support.wait import eventually

pytestmark = pytest.mark.slow


def infer(client):
    return client.infer("a", tenant="acme")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return certificate_and_pair(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def door(way, server, files):
    """A server with TLS before the port of the protocol."""
    with TlsForwarder(files[1], server.http_url if way.protocol == "http" else server.grpc_url) as forwarder:
        yield forwarder


def test_answers_come_over_tls(way, door, files):
    text = "a long text " * 50_000  # of many records
    for settings in ({"ca_file": files[0]}, {"ca_file": str(files[0]), "tls": True}):
        answers = way.call(
            door.url, lambda client: client.infer_batch(["a", text], tenant="acme"), backbone="minilm", **settings
        )
        assert [answer.label for answer in answers] == ["a", text]
    assert door.connections == 2


def test_https_means_tls(way, door, files):
    answer = way.call(f"https://{door.url}", infer, ca_file=files[0])
    assert answer.label == "a", "the only backbone was found, too"


def test_the_certificate_must_be_trusted(way, door, files, tmp_path, monkeypatch):
    pauses = []
    before_each_pause(monkeypatch, lambda: pauses.append(1))
    other, _ = certificate_and_pair(tmp_path)
    for settings in ({"tls": True}, {"ca_file": other}):
        for call in (infer, lambda client: client.ready()):
            with pytest.raises(HplmClientError, match="--ca-file") as caught:
                way.call(door.url, call, backbone="minilm", **settings)
            assert type(caught.value) is NotTrusted and "certificate" in str(caught.value)
    assert not pauses, "another attempt would find the same certificate"


def test_the_certificate_must_be_for_the_name(way, server, files):
    target = server.http_url if way.protocol == "http" else server.grpc_url
    with TlsForwarder(files[1], target, "127.0.0.2") as forwarder, pytest.raises(NotTrusted, match=re.escape("127.0.0.2")):
        way.call(forwarder.url, infer, backbone="minilm", ca_file=files[0])


def test_plain_text_to_a_port_with_tls_names_the_setting(way, door):
    with pytest.raises(ConnectionFailed, match="--tls"):
        way.call(door.url, infer, backbone="minilm", retries=0)
    assert way.call(door.url, lambda client: client.ready()) is False


def test_tls_to_a_plain_port_names_the_setting(way, server, files):
    for url in (server.http_url, server.grpc_url):
        with pytest.raises(NotConnected, match="--tls"):
            way.call(url, infer, backbone="minilm", ca_file=files[0], retries=0)
    with Canned(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n") as plain, pytest.raises(NotConnected, match="--tls"):
        way.call(plain.url, infer, backbone="minilm", ca_file=files[0], retries=0)


def test_only_where_it_may_help_is_tls_mentioned(way, server, files):
    """Neither of a port without a server nor of a connection that is lost after an answer."""
    with pytest.raises(NotConnected) as caught:
        way.call("127.0.0.1:1", infer, backbone="minilm", ca_file=files[0], retries=0)
    assert "--tls" not in str(caught.value)
    with pytest.raises(NotConnected) as caught:
        way.call("127.0.0.1:1", infer, backbone="minilm", retries=0)
    assert "--tls" not in str(caught.value)


def test_a_handshake_has_a_time_limit(way, files):
    with Silent() as silent, pytest.raises(ConnectionFailed) as caught:
        way.call(silent.url, infer, backbone="minilm", ca_file=files[0], network_timeout=1.0, retries=5)
    assert type(caught.value) is ClientTimeout


@pytest.mark.parametrize("is_async", [False, True])
def test_a_server_that_answers_byte_by_byte_times_out(is_async, files):
    dripping = Dripping(b"HTTP/1.1 200 OK\r\nx: ")
    with dripping, TlsForwarder(files[1], dripping.url) as door, pytest.raises(ConnectionFailed) as caught:
        Way("http", is_async).call(door.url, infer, backbone="minilm", ca_file=files[0], network_timeout=0.5)
    assert type(caught.value) is ClientTimeout


class SlowReader(StandIn):
    received = 0

    def handle(self, client):
        while piece := client.recv(65536):
            self.received += len(piece)
            time.sleep(0.005)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_server_that_reads_piece_by_piece_times_out(is_async, files):
    slow = SlowReader()
    with slow, TlsForwarder(files[1], slow.url) as door, pytest.raises(ConnectionFailed) as caught:
        Way("http", is_async).call(
            door.url, lambda client: client.infer("x" * 60_000_000, tenant="acme"), backbone="minilm", ca_file=files[0],
            network_timeout=1.0,
        )  # fmt: skip
    assert type(caught.value) is ClientTimeout and slow.received < 30_000_000


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_connection_is_used_again(server, files, protocol):
    target = server.http_url if protocol == "http" else server.grpc_url
    with TlsForwarder(files[1], target) as door, HplmClient(door.url, protocol, "minilm", ca_file=files[0]) as client:
        assert [infer(client).label for _ in range(5)] == ["a"] * 5
        assert door.connections == 1


def test_a_connection_that_the_server_closed_is_replaced(files):
    once = Canned(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    with once, TlsForwarder(files[1], once.url) as door, HplmClient(door.url, ca_file=files[0]) as client:
        assert client.ready()
        eventually(lambda: not is_quiet(client._transport._idle[-1].sock))
        assert client.ready() and door.connections == 2


def test_threads_share_one_client(server, files):
    with TlsForwarder(files[1], server.http_url) as door, HplmClient(door.url, backbone="minilm", ca_file=files[0]) as client:
        with ThreadPoolExecutor(8) as threads:
            labels = list(threads.map(lambda number: client.infer(str(number), tenant="acme").label, range(100)))
        assert labels == [str(number) for number in range(100)]
        assert door.connections <= 8
        gc.collect()
        open_before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) < open_before


@pytest.mark.parametrize("kind", [HplmClient, AsyncHplmClient])
def test_a_wrong_file_is_refused_at_once(kind, tmp_path, files):
    no_certificate = tmp_path / "key.pem"
    no_certificate.write_text("-----BEGIN PRIVATE KEY-----\n")
    for path in (tmp_path / "missing.pem", no_certificate, tmp_path):
        for protocol in ("http", "grpc"):
            with pytest.raises(InvalidInput, match=re.escape(str(path))):
                kind("127.0.0.1:443", protocol, ca_file=path)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("https://door.example.com", "door.example.com:443"),
        ("https://door.example.com:8443", "door.example.com:8443"),
        ("https://[::1]", "[::1]:443"),
        ("127.0.0.1:8000", "127.0.0.1:8000"),
    ],
)
def test_https_has_a_usual_port(url, address):
    settings = Settings(url)
    assert settings.address == address and (settings.context is not None) == url.startswith("https://")


@pytest.mark.parametrize("url", ["https://", "https://door/path", "https://door:x", "door", "http://door:80", "HTTPS:door:443"])
def test_wrong_addresses_are_refused(url):
    with pytest.raises(InvalidInput):
        Settings(url)


def test_streams_share_the_trust(server, files):
    """Generation opens connections of its own; the server has no decoder, and says so over them."""

    async def streamed(url):
        async with AsyncHplmClient(url, "http", "minilm", ca_file=files[0]) as client:
            return [piece async for piece in client.stream("a", tenant="acme")]

    with TlsForwarder(files[1], server.http_url) as door:
        with pytest.raises(HplmClientError) as caught:
            asyncio.run(streamed(door.url))
        assert not isinstance(caught.value, ConnectionFailed)
    with TlsForwarder(files[1], server.grpc_url) as door, HplmClient(door.url, "grpc", "minilm", ca_file=files[0]) as client:
        with pytest.raises(HplmClientError) as caught:
            list(client.stream("a", tenant="acme"))
        assert not isinstance(caught.value, ConnectionFailed)
