"""The front door, a real HAProxy before a real Triton: what is allowed gets through, also for clients of hplm_client."""

import asyncio
import json
import random

import pytest

from hplm_client import AsyncHplmClient, HplmClient, NoBackbone, NoTenant
from testing.toy import WORDS
from tests.cluster.front import GENERATE, INFER
from tests.deploy.door import StockAtDoor
from tests.support.message import mentions

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

LONGEST_REQUEST = 16 * 1024 * 1024
PROTOCOLS = ("http", "grpc")


def body_of(texts=("a",), shape=None, **more):
    text = {"name": "TEXT", "shape": shape or [len(texts), 1], "datatype": "BYTES", "data": list(texts)}
    return json.dumps({"parameters": {"tenant": "acme"}, "inputs": [text], **more}).encode()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_requests_and_all_parameters_get_through(door, protocol):
    stock = StockAtDoor(door, protocol)
    longest = " ".join(random.Random(0).choices(WORDS, k=20_000))[:90_000]
    more = dict(truncate=True, top_k=2, hplm_priority=-3, hplm_rung=1, timeout=500_000_000)
    answer = stock.ask([longest] * 30 + ["a"] * 994, "acme", **more)
    assert answer["LABEL"].shape == (1024, 2)


def test_json_of_any_text_gets_through(door):
    text = 'quotes " and \\ escapes \u00fc \u20ac \U0001f600 [[[[ {"classification": 1} ' * 100
    answer = door.post(
        INFER, body_of([text] * 100, outputs=[{"name": "LABEL"}], parameters={"tenant": "acme", "truncate": True})
    )
    assert answer.status == 200 and len(json.loads(answer.body)["outputs"][0]["data"]) == 100, answer
    assert door.post(GENERATE, json.dumps({"TEXT": WORDS[0], "tenant": "acme"}).encode()).status == 200
    answer = door.post(INFER, body_of(['a\n\u0007 "x\\\\u0000']).replace(b'"acme"', rb'"\u0061cme"'))
    assert answer.status == 200, answer
    assert door.post(INFER, body_of(), authorization="Bearer " + "a" * 5_000).status == 200
    answer = door.post(INFER, body_of(["a" * (LONGEST_REQUEST - 1000)]))
    assert answer.status == 400 and mentions(answer.error, "100,000"), "this one hPLM refuses"
    assert door.send("GET", "/v2/health/live").status == door.send("GET", "/v2/health/ready").status == 200
    assert StockAtDoor(door, "grpc").client.is_server_ready()


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
def test_without_a_backbone_the_setting_is_named(door, url, protocol):
    with HplmClient(url, protocol, ca_file=door.certificate) as client:
        for way in ("infer", "generate"):
            with pytest.raises(NoBackbone, match="--backbone"):
                getattr(client, way)("a", tenant="acme")
        assert client.ready()
    with pytest.raises(NoBackbone, match="--backbone"):
        asynchronously(url, protocol, None, door, ask)
