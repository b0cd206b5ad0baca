"""The client over TLS, with a real Triton behind a server that speaks it."""

from __future__ import annotations

import gc
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from client_fakes import Canned, Forwarder, before_each_pause, infer, raising, read

from hplm_client import ConnectionFailed, HplmClient, HplmClientError, NotConnected, NotTrusted
from loadtest.proxy import make_certificate

pytestmark = pytest.mark.slow


@pytest.fixture
def door(way, server, certificate):
    """A server with TLS before the port of the protocol."""
    with Forwarder(way.url(server), certificate[1]) as forwarder:
        yield forwarder


def test_answers_come_over_tls(way, door, certificate):
    text, file = "a long text " * 50_000, certificate[0]  # of many records
    for settings in ({"ca_file": file}, {"ca_file": str(file), "tls": True}):
        answers = way.call(
            door.url, lambda client: client.infer_batch(["a", text], tenant="acme"), backbone="minilm", **settings
        )
        assert [answer.label for answer in answers] == ["a", text]
    assert door.connections == 2
    assert way.call(f"https://{door.url}", infer, ca_file=file).label == "a", "the only backbone was found, too"


def test_the_certificate_must_be_trusted_and_for_the_name(way, server, door, certificate, tmp_path, monkeypatch):
    pauses = []
    before_each_pause(monkeypatch, lambda: pauses.append(1))
    for settings in ({"tls": True}, {"ca_file": make_certificate(tmp_path)[0]}):
        for call in (infer, lambda client: client.ready()):
            with raising(NotTrusted, match="--ca-file") as caught:
                way.call(door.url, call, backbone="minilm", **settings)
            assert "certificate" in str(caught.value)
    with (
        Forwarder(way.url(server), certificate[1], "127.0.0.2") as other,
        pytest.raises(NotTrusted, match=re.escape("127.0.0.2")),
    ):
        way.call(other.url, infer, backbone="minilm", ca_file=certificate[0])
    assert not pauses, "another attempt would find the same certificate"


def test_tls_on_one_side_only_names_the_setting(way, server, door, certificate):
    with pytest.raises(ConnectionFailed, match="--tls"):
        way.call(door.url, infer, backbone="minilm", retries=0)
    assert way.call(door.url, lambda client: client.ready()) is False
    with Canned(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n") as plain:
        for url in (server.http_url, server.grpc_url, plain.url):
            with pytest.raises(NotConnected, match="--tls"):
                way.call(url, infer, backbone="minilm", ca_file=certificate[0], retries=0)


def test_threads_share_one_client_whose_end_closes_their_connections(server, certificate):
    with (
        Forwarder(server.http_url, certificate[1]) as door,
        HplmClient(door.url, backbone="minilm", ca_file=certificate[0]) as client,
    ):
        with ThreadPoolExecutor(8) as threads:
            labels = list(threads.map(lambda number: client.infer(str(number), tenant="acme").label, range(100)))
        assert labels == [str(number) for number in range(100)]
        assert door.connections <= 8
        gc.collect()
        open_before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) < open_before


def test_streams_share_the_trust(way, door, certificate):
    """Generation opens connections of its own; the server has no decoder, and says so over them."""
    with pytest.raises(HplmClientError) as caught:
        way.call(door.url, read, backbone="minilm", ca_file=certificate[0])
    assert not isinstance(caught.value, ConnectionFailed)
