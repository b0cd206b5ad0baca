"""hplm_client through the front door: a real HAProxy before a real Triton."""

from __future__ import annotations

import asyncio

import pytest
from tritonclient.utils import InferenceServerException

from hplm_client import AsyncHplmClient, ConnectionFailed, HplmClient, NoBackbone, NoTenant, NotTrusted
from testing.toy import WORDS
from tests.deploy.door import StockAtDoor, haproxy, require_haproxy

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

PROTOCOLS = ("http", "grpc")


@pytest.fixture(scope="module")
def door(servers, tmp_path_factory):
    require_haproxy()
    server = servers.get("toy")
    with haproxy(tmp_path_factory.mktemp("door"), server.http_url, server.grpc_url, "toy") as door:
        yield door


@pytest.fixture
def url(door):
    return f"localhost:{door.port}"


def asynchronously(url, protocol, backbone, door, use):
    async def used():
        async with AsyncHplmClient(url, protocol, backbone, ca_file=door.certificate) as client:
            return await use(client)

    return asyncio.run(used())


def ask(client):
    return client.infer(WORDS[0], tenant="acme", deadline_ms=30_000, logits=True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("backbone", ["toy", "hplm"])
def test_answers_are_those_of_the_server(server, door, url, protocol, backbone):
    direct = server.http_url if protocol == "http" else server.grpc_url
    with HplmClient(direct, protocol, backbone) as client:
        expected = ask(client)
    with HplmClient(url, protocol, backbone, ca_file=door.certificate) as client:
        assert ask(client) == expected and client.ready()
        assert len(client.infer_batch([" ".join(WORDS * 20)] * 150, tenant="acme", truncate=True)) == 150
        with pytest.raises(NoTenant):
            client.infer("a", tenant="nobody")
    assert asynchronously(url, protocol, backbone, door, ask) == expected
    assert asynchronously(url, protocol, backbone, door, lambda client: client.ready())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_other_settings_name_the_way_out(door, url, protocol):
    with HplmClient(url, protocol, ca_file=door.certificate) as client:
        for way in ("infer", "generate"):
            with pytest.raises(NoBackbone, match="--backbone"):
                getattr(client, way)("a", tenant="acme")
        assert client.ready()
    with pytest.raises(NoBackbone, match="--backbone"):
        asynchronously(url, protocol, None, door, ask)
    for settings, kind, named in (({"tls": True}, NotTrusted, "--ca-file"), ({}, ConnectionFailed, "--tls")):
        with HplmClient(url, protocol, "toy", retries=0, **settings) as client, pytest.raises(kind, match=named):
            ask(client)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_door_passes_the_header_of_the_tenant_on(door, protocol):
    stock = StockAtDoor(door, protocol)
    assert stock.ask([WORDS[0]], "acme", headers={"hplm-tenant": "acme"})["LABEL"].shape == (1, 1)
    with pytest.raises(InferenceServerException, match=r"invalid_input.*hplm-tenant"):
        stock.ask([WORDS[0]], "acme", headers={"hplm-tenant": "beta"})
