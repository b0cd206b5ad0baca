"""The client against a real Triton, in each of the four ways."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import fake_repository
import pytest
import tritonclient.http

from hplm_client import (
    Answer,
    AsyncHplmClient,
    Broken,
    ClientTimeout,
    Forbidden,
    HplmClient,
    InvalidInput,
    NoBackbone,
    NoTenant,
    QueueFull,
    Row,
    ServerFault,
    wire,
)

pytestmark = pytest.mark.slow


def test_a_text_comes_back_with_its_label(ask):
    answer = ask(lambda client: client.infer("naïve 文字 \N{PILE OF POO}", tenant="acme"))
    assert answer == Answer((Row("naïve 文字 \N{PILE OF POO}", 1.0, (0, 10)),), "v7")
    assert (answer.label, answer.score, answer.labels) == (answer.rows[0].label, 1.0, (answer.rows[0].label,))


def test_a_batch_keeps_its_order(ask):
    texts = [f"text {number}" for number in range(1000)]
    assert [answer.label for answer in ask(lambda client: client.infer_batch(texts, tenant="acme"))] == texts


def test_each_text_has_exactly_its_own_rows(ask):
    short, long, blank = ask(lambda client: client.infer_batch(["one", "~ two  three ~", "  "], tenant="tagger"))
    assert short.rows == (Row("ONE", 1.0, (0, 3)),)
    assert long.labels == ("", "TWO", "THREE", "")
    assert [row.span for row in long.rows] == [(0, 1), (2, 5), (7, 12), (13, 14)]
    assert blank.rows == () and blank.label is None and blank.score is None


def test_pairs_are_sent_with_their_texts(ask):
    answers = ask(lambda client: client.infer_batch(["a", "b"], pairs=["c", ""], tenant="acme"))
    assert [answer.label for answer in answers] == ["a|c", "b|"]
    assert ask(lambda client: client.infer("a", pair="d", tenant="acme")).label == "a|d"


def test_logits_are_returned_only_on_request(ask):
    assert ask(lambda client: client.infer("a", tenant="acme")).rows[0].logits is None
    assert ask(lambda client: client.infer("a", tenant="acme", logits=True)).rows[0].logits == (0.0, 1.0, 2.0)


def test_levels_are_returned_only_on_request(ask):
    assert ask(lambda client: client.infer("a", tenant="acme", rung=2)).level is None
    assert ask(lambda client: client.infer("a", tenant="acme", rung=2, level=True)).level == 2


def test_top_k_gives_k_rows(ask):
    assert [row.score for row in ask(lambda client: client.infer("a", tenant="acme", top_k=2)).rows] == [1.0, 0.5]


def test_parameters_key_and_deadline_reach_the_model(ask):
    def told(**options):
        return json.loads(ask(lambda client: client.infer("parameters", tenant="acme", **options), api_key="K3Y").label)

    facts = told(truncate=True, top_k=1, priority=3, rung=2, deadline_ms=60_000)
    headers = {name.lower(): facts["parameters"].pop(name) for name in ("authorization", "hplm-tenant")}
    assert facts["parameters"] == {"tenant": "acme", "truncate": True, "top_k": 1, "hplm_priority": 3, "hplm_rung": 2}
    assert headers == {"authorization": "Bearer K3Y", "hplm-tenant": "acme"}
    assert 50_000_000 < facts["timeout"] <= 60_000_000
    assert told()["timeout"] == 0


def test_without_a_key_no_header_of_one_is_sent(ask):
    facts = json.loads(ask(lambda client: client.infer("parameters", tenant="acme")).label)
    assert facts["parameters"] == {"tenant": "acme", "hplm-tenant": "acme"}


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("invalid_input", InvalidInput),
        ("no_tenant", NoTenant),
        ("queue_full", QueueFull),
        ("broken", Broken),
    ],
)
def test_the_error_word_of_each_status_raises_its_exception(ask, word, kind):
    with pytest.raises(kind, match=rf"\[{word}\] as asked retry after 20 ms") as caught:
        ask(lambda client: client.infer(f"fail {word} retry after 20 ms", tenant="acme"), retries=0)
    assert type(caught.value) is kind


def test_the_server_refuses_an_unknown_tenant(ask):
    with pytest.raises(NoTenant):
        ask(lambda client: client.infer("a", tenant="nobody"))


def test_tritons_own_errors_raise_different_exceptions(ask):
    with pytest.raises(NoBackbone, match="nope"):
        ask(lambda client: client.infer("a", tenant="acme"), backbone="nope")
    with pytest.raises(InvalidInput, match="1024"):
        ask(lambda client: client.infer_batch(["a"] * 1025, tenant="acme"))
    with pytest.raises(ServerFault, match="no word for this"):
        ask(lambda client: client.infer("raise", tenant="acme"))


def test_an_answer_within_the_grace_after_the_deadline_is_returned(ask, monkeypatch):
    monkeypatch.setattr("hplm_client.retry.GRACE_S", 30.0)
    assert ask(lambda client: client.infer("sleep 0.05", tenant="acme", deadline_ms=10)).label == "sleep 0.05"


def test_the_next_request_after_a_timeout_is_fine(ask, way):
    if way.is_async:

        async def both(client):
            with pytest.raises(ClientTimeout):
                await client.infer("sleep 3", tenant="acme", deadline_ms=100)
            return await client.infer("next", tenant="acme")

    else:

        def both(client):
            with pytest.raises(ClientTimeout):
                client.infer("sleep 3", tenant="acme", deadline_ms=100)
            return client.infer("next", tenant="acme")

    assert ask(both).label == "next"


def test_refused_requests_are_retried_until_they_are_accepted(ask, way):
    for word in ("queue_full", "quota", "draining"):
        key = f"{way}{word}".replace(" ", "")
        assert ask(lambda client, text=f"flaky {key} 2 {word}": client.infer(text, tenant="acme")).label == "3"


def test_retries_end(ask, way):
    key = f"{way}end".replace(" ", "")
    with pytest.raises(QueueFull):
        ask(lambda client: client.infer(f"flaky {key} 2 queue_full", tenant="acme"), retries=1)
    assert ask(lambda client: client.infer(f"flaky {key} 2 queue_full", tenant="acme"), retries=0).label == "3"


def test_accepted_requests_are_not_retried(ask, way):
    for word in ("deadline", "capacity", "internal", "broken", "invalid_input", "no_tenant"):
        key = f"{way}{word}".replace(" ", "")
        with pytest.raises(Exception, match=rf"\[{word}\]"):
            ask(lambda client, text=f"flaky {key} 1 {word}": client.infer(text, tenant="acme"))
        assert ask(lambda client, text=f"flaky {key} 1 {word}": client.infer(text, tenant="acme")).label == "2"


def test_readiness(ask):
    assert ask(lambda client: client.ready()) is True
    assert ask(lambda client: client.ready(), backbone=None) is True
    assert ask(lambda client: client.ready(), backbone="nope") is False


def test_the_only_backbone_is_found(ask):
    assert ask(lambda client: client.infer("found", tenant="acme"), backbone=None).label == "found"
    assert ask(lambda client: client.backbones()) == ["minilm"]


def test_a_server_that_hides_its_models_needs_a_backbone_name(monkeypatch, ask, way):
    def refused(*_):
        raise Forbidden("This API is restricted")

    monkeypatch.setattr(wire, "backbones_in", refused)
    with pytest.raises(NoBackbone, match="This API is restricted"):
        ask(lambda client: client.infer("a", tenant="acme"), backbone=None)


def test_of_two_backbones_one_must_be_named(ask, server):
    headers = dict([server.admin_header])
    fake_repository.write(server.repository, "twin", answering="minilm-lookup")
    with tritonclient.http.InferenceServerClient(server.http_url) as control:
        try:
            for model in ("twin", "twin-lookup", "twin-upper"):
                control.load_model(model, headers=headers)
            with pytest.raises(NoBackbone, match="minilm, twin"):
                ask(lambda client: client.infer("a", tenant="acme"), backbone=None)
        finally:
            for model in ("twin", "twin-lookup", "twin-upper"):
                control.unload_model(model, headers=headers)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_threads_share_a_client(server, protocol):
    url = server.http_url if protocol == "http" else server.grpc_url
    with HplmClient(url, protocol, "minilm") as client, ThreadPoolExecutor(16) as threads:
        texts = [f"text {number}" for number in range(300)]
        answers = threads.map(lambda text: client.infer(text, tenant="acme"), texts)
        assert [answer.label for answer in answers] == texts


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_threads_do_not_wait_for_each_other(server, protocol):
    """The server answers only when it has all eight requests."""
    url = server.http_url if protocol == "http" else server.grpc_url
    with HplmClient(url, protocol, "minilm") as client, ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda _: client.infer(f"meet {protocol} 8", tenant="acme"), range(8))
        assert [answer.label for answer in answers] == [f"meet {protocol} 8"] * 8


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tasks_do_not_wait_for_each_other(server, protocol):
    async def all_at_once():
        async with AsyncHplmClient(url, protocol, "minilm") as client:
            return await asyncio.gather(*(client.infer(f"meet tasks-{protocol} 50", tenant="acme") for _ in range(50)))

    url = server.http_url if protocol == "http" else server.grpc_url
    assert [answer.label for answer in asyncio.run(all_at_once())] == [f"meet tasks-{protocol} 50"] * 50
