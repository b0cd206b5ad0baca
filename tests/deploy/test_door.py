"""The front door, a real HAProxy before a real Triton: what is allowed gets through, also for clients of hplm_client."""

import json
import random
import time
from functools import partial

import pytest

from hplm_client import NoBackbone, NoTenant
from testing.toy import WORDS
from tests.cluster.front import GENERATE, INFER
from tests.server.stock import body_of, refused
from tests.support.message import mentions
from tests.support.metrics import Scraped
from tests.support.wait import eventually
from tests.support.ways import generate, infer, ready

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

LONGEST_REQUEST = 16 * 1024 * 1024
LONG = " ".join(random.Random(0).choices(WORDS, k=20_000))[:90_000]


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
    listed = door.post(INFER, body_of(outputs=[{"name": "LABEL"}], parameters={"hplm_tenants": True}))
    assert listed.status == 200 and "acme" in listed.json["outputs"][0]["data"][0], listed
    assert door.send("GET", "/v2/health/live").status == door.send("GET", "/v2/health/ready").status == 200


@pytest.fixture
def call(way, door):
    """A function that runs `call(lambda client: ..., **settings)` with a client of the door."""
    return partial(way.call, f"localhost:{door.port}", ca_file=door.certificate)


@pytest.mark.parametrize("backbone", ["toy", "hplm"])
def test_answers_are_those_of_the_server_also_to_large_requests_with_all_parameters(server, way, call, backbone):
    ask = partial(infer, text=WORDS[0], deadline_ms=30_000, logits=True)
    assert call(ask, backbone=backbone) == way.call(way.url(server), ask, backbone=backbone)
    assert call(ready, backbone=backbone)
    more = {"truncate": True, "top_k": 2, "priority": -3, "deadline_ms": 500_000, "parameters": {"hplm_rung": 1}}
    texts = [LONG] * 30 + ["a"] * 994
    answers = call(lambda client: client.infer_batch(texts, tenant="acme", **more), backbone=backbone)
    assert [len(answer.rows) for answer in answers] == [2] * 1024
    with pytest.raises(NoTenant):
        call(partial(infer, tenant="nobody"), backbone=backbone)


def test_without_a_backbone_the_setting_is_named(call):
    for use in (infer, generate):
        with pytest.raises(NoBackbone, match="--backbone"):
            call(use)
    assert call(ready)


def test_a_deadline_counts_from_the_arrival_that_the_door_says_and_metrics_tell_how_long_a_request_has_waited(server):
    """`test_limits` shows that it says a request's arrival there, `tests/tenants/test_arrival.py` which times count."""
    stock, before = server.stock(), Scraped(server)
    arrived = {"hplm-arrived": str(time.time_ns() // 1000 - 50_000_000)}
    for model in ("toy", "hplm"):
        with refused("deadline"):
            stock.ask([WORDS[0]], "acme", model=model, timeout=15_000_000, headers=arrived)
        stock.ask([WORDS[0]], "acme", model=model, headers=arrived)
        with refused("invalid_input", "hplm-arrived"):
            stock.ask([WORDS[0]], "acme", model=model, headers={"hplm-arrived": "soon"})
    eventually(lambda: Scraped(server, before).of("hplm_before_lookup_seconds_count") > 0)
    eventually(lambda: Scraped(server, before).of("hplm_before_lookup_seconds_sum") > 50)
