"""The client against a real Triton, in each of the four ways."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.http
from client_fakes import infer, raising, write_backbone

from hplm_client import (
    Answer,
    Broken,
    ClientTimeout,
    HplmClientError,
    InvalidInput,
    NoBackbone,
    NoTenant,
    QueueFull,
    Row,
    ServerFault,
)

pytestmark = pytest.mark.slow


def test_texts_and_pairs_come_back_with_their_labels_in_their_order(ask):
    odd = "naïve 文字 \N{PILE OF POO}"
    answer = ask(lambda client: client.infer(odd, tenant="acme"))
    assert answer == Answer((Row(odd, 1.0, (0, 10)),), "v7")
    assert (answer.label, answer.score, answer.labels) == (answer.rows[0].label, 1.0, (answer.rows[0].label,))
    texts = [f"text {number}" for number in range(1000)]
    assert [answer.label for answer in ask(lambda client: client.infer_batch(texts, tenant="acme"))] == texts
    answers = ask(lambda client: client.infer_batch(["a", "b"], pairs=["c", ""], tenant="acme"))
    assert [answer.label for answer in answers] == ["a|c", "b|"]
    assert ask(lambda client: client.infer("a", pair="d", tenant="acme")).label == "a|d"


def test_each_text_has_exactly_its_own_rows(ask):
    short, long, blank = ask(lambda client: client.infer_batch(["one", "~ two  three ~", "  "], tenant="tagger"))
    assert short.rows == (Row("ONE", 1.0, (0, 3)),)
    assert long.labels == ("", "TWO", "THREE", "")
    assert [row.span for row in long.rows] == [(0, 1), (2, 5), (7, 12), (13, 14)]
    assert blank.rows == () and blank.label is None and blank.score is None


def test_further_outputs_are_returned_only_on_request(ask):
    plain = ask(lambda client: client.infer("a", tenant="sure", rung=2))
    full = ask(lambda client: client.infer("a", tenant="sure", rung=2, level=True, logits=True, confidence=True, top_k=2))
    assert (plain.rows[0].logits, plain.level, plain.confidence) == (None, None, None)
    assert (full.rows[0].logits, full.level, full.confidence) == ((0.0, 1.0, 2.0), 2, 0.75)
    assert [row.score for row in full.rows] == [1.0, 0.5]


def test_parameters_key_and_deadline_reach_the_model(ask):
    def told(settings, **options):
        return json.loads(ask(lambda client: client.infer("parameters", tenant="acme", **options), **settings).label)

    facts = told({"api_key": "K3Y"}, truncate=True, top_k=1, priority=3, rung=2, deadline_ms=60_000)
    headers = {name.lower(): facts["parameters"].pop(name) for name in ("authorization", "hplm-tenant")}
    assert facts["parameters"] == {"tenant": "acme", "truncate": True, "top_k": 1, "hplm_priority": 3, "hplm_rung": 2}
    assert headers == {"authorization": "Bearer K3Y", "hplm-tenant": "acme"}
    assert 0 < facts["timeout"] <= 60_000_000
    assert told({}) == {"parameters": {"tenant": "acme", "hplm-tenant": "acme"}, "timeout": 0}


@pytest.mark.parametrize(
    ("texts", "backbone", "kind", "said"),
    [
        *((f"fail {word} retry after 20 ms", "minilm", kind, rf"\[{word}\] as asked retry after 20 ms") for word, kind in (
            ("invalid_input", InvalidInput), ("no_tenant", NoTenant), ("queue_full", QueueFull), ("broken", Broken),
        )),
        ("raise", "minilm", ServerFault, "no word for this"),
        (["a"] * 1025, "minilm", InvalidInput, "1024"),
        ("a", "nope", NoBackbone, "nope"),
    ],
)  # fmt: skip
def test_errors_of_the_server_raise_different_exceptions(ask, texts, backbone, kind, said):
    def use(client):
        return (client.infer if isinstance(texts, str) else client.infer_batch)(texts, tenant="acme")

    with raising(kind, match=said):
        ask(use, backbone=backbone, retries=0)


def test_the_next_request_after_a_timeout_is_fine(ask, way):
    text = f"meet timeout-{way.protocol}-{way.is_async} 2"  # answered when the second of them comes

    async def one_after_the_other(client):
        with pytest.raises(ClientTimeout):
            await client.infer(text, tenant="acme", deadline_ms=100)
        return await client.infer(text, tenant="acme")

    def blocking(client):
        with pytest.raises(ClientTimeout):
            client.infer(text, tenant="acme", deadline_ms=100)
        return client.infer(text, tenant="acme")

    assert ask(one_after_the_other if way.is_async else blocking).label == text


def test_refused_requests_are_retried_until_they_are_accepted_or_retries_end_and_accepted_ones_are_not(ask, way):
    """Which words say so is decided in `test_client_retry.py`."""

    def flaky(key, failures, word, **settings):
        text = f"flaky {key}-{way.protocol}-{way.is_async} {failures} {word}"
        return ask(lambda client: client.infer(text, tenant="acme"), **settings).label

    assert flaky("accepted", 2, "queue_full") == "3"
    with pytest.raises(HplmClientError, match=r"\[queue_full\]"):
        flaky("end", 2, "queue_full", retries=1)
    assert flaky("end", 2, "queue_full", retries=0) == "3"
    with pytest.raises(HplmClientError, match=r"\[deadline\]"):
        flaky("once", 1, "deadline")
    assert flaky("once", 1, "deadline") == "2"


def test_the_only_backbone_is_found_and_of_two_one_must_be_named(ask, server):
    assert [ask(lambda client: client.ready(), backbone=name) for name in ("minilm", None, "nope")] == [True, True, False]
    assert ask(infer, backbone=None).label == "a"
    assert ask(lambda client: client.backbones()) == ["minilm"]
    headers, models = dict([server.admin_header]), ("twin", "twin-lookup", "twin-upper")
    write_backbone(server.repository, "twin", answering="minilm-lookup")
    with tritonclient.http.InferenceServerClient(server.http_url) as control:
        try:
            for model in models:
                control.load_model(model, headers=headers)
            with pytest.raises(NoBackbone, match="minilm, twin"):
                ask(infer, backbone=None)
        finally:
            for model in models:
                control.unload_model(model, headers=headers)


def test_calls_share_a_client_and_do_not_wait_for_each_other(ask, way):
    """The server answers the latter only when it has all eight requests."""
    rounds = [f"text {number}" for number in range(300)], [f"meet {way.protocol}-{way.is_async} 8"] * 8

    async def by_tasks(client):
        return [await asyncio.gather(*(client.infer(text, tenant="acme") for text in texts)) for texts in rounds]

    def by_threads(client):
        with ThreadPoolExecutor(8) as threads:
            return [list(threads.map(lambda text: client.infer(text, tenant="acme"), texts)) for texts in rounds]

    answered = ask(by_tasks if way.is_async else by_threads)
    assert [[answer.label for answer in answers] for answers in answered] == [*rounds]
