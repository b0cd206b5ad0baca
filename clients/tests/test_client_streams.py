"""Generated text from servers that keep what they were sent, end too early, or are no decoder."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from client_fakes import before_each_pause, canned, raising
from triton_fakes import PART, STREAM, Refusal, chunk, event

from hplm_client import AsyncHplmClient, ClientTimeout, ConnectionLost, HplmClient, InvalidInput, UnexpectedAnswer
from hplm_client.retry import Attempts
from hplm_client.settings import ClientSettings
from tests.support.fakes import answer as answer_of
from tests.support.wait import Clock, eventually
from tests.support.ways import Way, generate, infer, read

REFUSAL = "[invalid_input] as always"
UNFINISHED = [{**PART, "finish_reason": ""}]  # after which more would come
LONG = "a" * 10_000_000  # more than a server takes before it reads
both = pytest.mark.parametrize("is_async", [False, True])


@pytest.mark.parametrize("call", [infer, generate, read])
def test_every_request_names_its_tenant_in_a_header(ask, fake, call):
    fake.script = [Refusal(REFUSAL, 400)]
    with raising(InvalidInput):
        ask(call, api_key="K3Y")
    (request,) = fake.requests
    assert request.headers.items() >= {"hplm-tenant": "acme", "authorization": "Bearer K3Y"}.items()


@pytest.mark.parametrize(
    ("given", "kind"), [(np.str_("1"), str), (True, bool), (2, int), (2.5, float)], ids=["str", "bool", "int", "float"]
)
def test_parameters_of_a_call_keep_their_kind(ask, fake, given, kind):
    ask(lambda client: generate(client, tenant=np.str_("acme"), priority=given), backbone="chat")
    sent = fake.requests[0].parameters
    assert (sent["hplm_priority"], type(sent["hplm_priority"]), sent["tenant"]) == (given, kind, "acme")


@pytest.mark.parametrize("call", [generate, read])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tenant": "\ud800"}, "tenant"), ({"prompt": "\ud800"}, "the prompt"), ({"deadline_ms": 1e13}, "deadline_ms"),
        ({"prompt": None, "messages": [{"role": "user", "content": "\ud800"}]}, "a message"), ({"priority": 2**63}, "priority"),
        ({"priority": []}, "priority"), ({"truncate": "false"}, "truncate"),
        ({"temperature": float("nan")}, "messages or settings .*: give dict,"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_they_are_sent(way, call, given, named):
    with pytest.raises(InvalidInput, match=f"^{named} "):
        way.call("127.0.0.1:1", lambda client: call(client, **given))


@both
def test_a_call_that_ends_before_its_prompt_is_sent_raises_the_error_of_the_server(fake, is_async):
    fake.refuses_unread = Refusal(REFUSAL, 400)
    for _ in range(5):
        with raising(InvalidInput):
            Way("grpc", is_async).call(fake.grpc_url, lambda client: generate(client, LONG), backbone="chat")


@both
def test_a_stream_or_call_without_an_answer_is_an_error(fake, is_async):
    with canned(STREAM + chunk(b"")) as server, raising(UnexpectedAnswer, match="'toy'"):
        Way("http", is_async).call(server.url, read, backbone="toy")
    fake.parts = []
    for call in (read, generate):
        with raising(UnexpectedAnswer, match="'chat'"):
            Way("grpc", is_async).call(fake.grpc_url, call, backbone="chat")


def test_attempts_before_the_first_part_of_a_stream_change_no_wait_for_a_later_one(way, fake, monkeypatch):
    clock = Clock()
    attempts = lambda settings, _: Attempts(settings.retries, None, settings.network_timeout, clock.monotonic)  # noqa: E731
    monkeypatch.setattr(ClientSettings, "attempts", attempts)
    before_each_pause(monkeypatch, lambda: clock.sleep(-5))  # more time is left, which shows sooner than less
    fake.parts, fake.script = UNFINISHED, [Refusal("[queue_full] retry after 1 ms")]
    with raising(ClientTimeout, match=r"within 0\.2 s: .*`network_timeout`"):
        way.call(way.url(fake), read, backbone="chat", network_timeout=0.2)


@both
def test_a_stream_that_is_cut_off_is_no_whole_answer(is_async):
    data = b'data: {"text_output": "a", "finish_reason": "", "num_input_tokens": 1, "num_output_tokens": 1}\n\n'
    for cut in (STREAM + chunk(data), answer_of(200, data * 2).removesuffix(data)):
        with canned(cut) as server, raising(ConnectionLost):
            Way("http", is_async).call(server.url, read, backbone="toy")
    for whole in (STREAM + event(PART) + chunk(b""), answer_of(200, data)):
        with canned(whole) as server:
            assert [piece.text for piece in Way("http", is_async).call(server.url, read, backbone="toy")] == ["a"]


@pytest.mark.parametrize(
    ("call", "changed"),
    [(generate, {"num_output_tokens": None}), (generate, {"num_input_tokens": []}), (read, {"finish_reason": ["", "stop"]})],
)
@both
def test_outputs_that_are_none_of_a_decoder_are_errors(fake, call, changed, is_async):
    fake.parts = [{**PART, **changed}]
    with raising(UnexpectedAnswer):
        Way("http", is_async).call(fake.http_url, call, backbone="chat")


def test_the_encoder_that_was_found_is_not_asked_to_generate(way, fake):
    async def awaited(client):
        return await client.backbone(), await generate(client), await client.backbone()

    used = awaited if way.is_async else lambda client: (client.backbone, generate(client), client.backbone)
    before, answer, after = way.call(way.url(fake), used)
    assert (before, answer.text, after) == ("minilm", "a", "minilm")


def test_many_streams_over_http_run_at_once_and_end_at_the_server_when_they_are_closed(fake):
    async def run():
        async with AsyncHplmClient(fake.http_url, backbone="chat") as client:
            streams = [client.stream("a", tenant="acme") for _ in range(120)]
            begun = await asyncio.gather(*map(anext, streams))
            assert len(begun) == 120 and await client.ready()
            for stream in streams:
                await stream.aclose()

    fake.parts = UNFINISHED
    asyncio.run(run())
    eventually(lambda: all(request.has_left for request in fake.requests))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_closed_stream_ends_at_the_server_and_the_next_request_is_answered(fake, protocol):
    fake.parts = UNFINISHED
    with HplmClient(Way(protocol).url(fake), protocol, "chat") as client:
        pieces = client.stream("a", tenant="acme")
        assert next(pieces).text == "a"
        pieces.close()
        eventually(lambda: fake.requests[0].has_left)
        fake.parts = [PART]
        assert generate(client).text == "a"
