"""A decoder behind a real Triton: streamed and whole answers, keys, bad input, cancelling, draining, a dead process."""

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from hplm.engine.backbone import Backbone
from hplm.model.prompts import Prompts
from hplm.server import inherited
from hplm.server.probing import State
from hplm.server.process_group import SHARED_MEMORY
from hplm.server.supervisor import Supervisor
from testing.generative import GenerativeReference
from tests.server.generating import GREEDY, PATIENCE, RETURN, Asked, ids_of, post, text_of
from tests.support.message import mentions
from tests.support.servers import SECRET, cancelled
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

LONG = {**GREEDY, "max_tokens": 16_000}


@pytest.fixture
def backbone(server):
    return Backbone(server.model_folder("chat"))


@pytest.fixture
def prompts(backbone):
    return Prompts.load(backbone.folder / Backbone.TOKENIZER, backbone.config)


def assert_equals_reference(ids, backbone, prompts, prompt, tenant):
    written = GenerativeReference(backbone).generate(prompts.encode(prompt).tolist(), tenant, 24)
    same = written.sure()
    assert ids[:same] == written.tokens[:same] and len(ids) == 24
    return same


def test_streams_of_several_tenants_equal_the_reference(server, backbone, prompts):
    asked = [
        (prompt, tenant, Asked(server, prompt, tenant, {**GREEDY, "logprobs": 0}, stream=True, **RETURN))
        for prompt in ("a", "several words", "é水👍")
        for tenant in ("plain", "lora", "wide")
    ]
    compared = 0
    for prompt, tenant, one in asked:
        pieces = one.pieces()
        ids = ids_of(pieces)
        compared += assert_equals_reference(ids, backbone, prompts, prompt, tenant)
        assert text_of(pieces) == prompts.decode(ids)
        assert sum(int(piece["num_output_tokens"][0]) for piece in pieces) == 24 and len(pieces) > 1
        assert [piece["finish_reason"][0] for piece in pieces] == [b""] * (len(pieces) - 1) + [b"length"]
        assert pieces[-1]["num_input_tokens"][0] == len(prompts.encode(prompt))
    assert compared > 100


def test_a_whole_answer_is_one_response_and_the_sum_of_its_stream(server):
    streamed = Asked(server, "some words", "lora", stream=True).pieces()
    (whole,) = Asked(server, "some words", "lora", exclude_input_in_output=True, **RETURN).pieces()
    assert whole["text_output"][0].decode() == text_of(streamed)
    assert (whole["finish_reason"][0], whole["num_output_tokens"][0]) == (b"length", 24)
    (echoed,) = Asked(server, "some words", "lora").pieces()
    assert echoed.keys() == {"text_output"}
    assert echoed["text_output"][0].decode() == "some words" + text_of(streamed)


def test_generate_and_generate_stream_give_what_grpc_gives(server):
    asked = {"text_input": "some words", "tenant": "lora"}
    expected = text_of(Asked(server, "some words", "lora", stream=True).pieces())
    status, whole = post(server, "generate", **asked, **GREEDY, exclude_input_in_output=True, return_finish_reason=True)
    assert (status, whole["text_output"], whole["finish_reason"]) == (200, expected, "length")
    status, events = post(server, "generate_stream", **asked, sampling_parameters=json.dumps(GREEDY), stream=True)
    assert status == 200 and len(events) > 1
    assert "".join(event["text_output"] for event in events) == expected


def test_messages_are_answered_as_the_chat_template_writes_them(server, prompts):
    chat = json.dumps([{"role": "user", "content": "some words"}])
    written = "<|258|>user\nsome words<|257|>\n<|258|>assistant\n"
    assert prompts.of_messages(chat) == prompts.encode(written).tolist()[1:]
    expected = text_of(Asked(server, written, "lora", stream=True).pieces())
    assert text_of(Asked(server, None, "lora", messages=chat, stream=True).pieces()) == expected
    (whole,) = Asked(server, None, "lora", messages=chat).pieces()
    assert whole["text_output"][0].decode() == expected
    (echoed,) = Asked(server, None, "lora", messages=chat, exclude_input_in_output=False).pieces()
    assert echoed["text_output"][0].decode() == "user\nsome words\nassistant\n" + expected
    asked = {"messages": chat, "tenant": "lora", "sampling_parameters": json.dumps(GREEDY)}
    assert post(server, "generate", **asked)[1]["text_output"] == expected
    _, events = post(server, "generate_stream", **asked, stream=True)
    assert "".join(event["text_output"] for event in events) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, ["text_input", "messages"]),
        ({"text_input": "a", "messages": "[]"}, ["text_input", "messages"]),
        ({"messages": "[]"}, ["messages"]),
        ({"messages": "hello"}, ["messages", "JSON"]),
        ({"messages": '[{"role": "user"}]'}, ["messages", "content"]),
    ],
)
def test_bad_messages_are_refused(server, given, named):
    with pytest.raises(InferenceServerException) as caught:
        Asked(server, given.get("text_input"), "plain", **{k: v for k, v in given.items() if k == "messages"}).piece()
    assert mentions(caught.value.message(), "[invalid_input]", *named)
    status, answer = post(server, "generate", tenant="plain", **given)
    assert status == 400 and mentions(answer["error"], "[invalid_input]", *named)


def test_several_choices_come_side_by_side(server):
    sampling = {"max_tokens": 8, "n": 3, "seed": 5, "ignore_eos": True}
    (whole,) = Asked(server, "ab", "plain", sampling, exclude_input_in_output=True, **RETURN).pieces()
    assert whole["text_output"].shape == (3,) and whole["num_output_tokens"].tolist() == [8, 8, 8]
    pieces = Asked(server, "ab", "plain", sampling, stream=True).pieces()
    assert [b"".join(piece["text_output"][i] for piece in pieces) for i in range(3)] == whole["text_output"].tolist()


def test_many_at_once_are_answered_each_with_its_own(server):
    texts = [f"number {i}" for i in range(24)]

    def ask(text):
        return post(server, "generate", text_input=text, tenant="lora", **GREEDY, exclude_input_in_output=True)[1][
            "text_output"
        ]

    alone = [ask(text) for text in texts[:6]]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, texts))
    assert together[:6] == alone and len(set(together)) > 12


@pytest.mark.parametrize(
    ("tenant", "sampling", "parameters", "word", "named"),
    [
        ("nobody", {}, {}, "no_tenant", []),
        ("keyed", {}, {}, "no_tenant", []),
        ("plain", {"temprature": 1}, {}, "invalid_input", ["temprature"]),
        ("plain", {"temperature": -1}, {}, "invalid_input", ["temperature"]),
        ("plain", {"max_tokens": 20_000}, {}, "invalid_input", ["max_tokens"]),
        ("plain", {"stop": [""]}, {}, "invalid_input", ["stop"]),
        ("plain", {}, {"first_token_ms": -1}, "invalid_input", ["first_token_ms"]),
        ("plain", {}, {"hplm_rung": 2}, "invalid_input", ["hplm_rung", 2, "'plain'"]),
        ("plain", {}, {"temperature": 1}, "invalid_input", ["temperature", "sampling_parameters"]),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_is_the_only_response(server, tenant, sampling, parameters, word, named, stream):
    asked = Asked(server, "a", tenant, sampling, parameters=parameters, stream=stream)
    with pytest.raises(InferenceServerException) as caught:
        asked.piece()
    assert mentions(caught.value.message(), f"[{word}]", *named)
    body = {"text_input": "a", "tenant": tenant, "sampling_parameters": json.dumps(sampling), **parameters}
    status, answer = post(server, "generate", **body)
    assert status == 400 and f"[{word}]" in answer["error"]


def test_a_key_stands_in_a_header_or_in_the_body(server):
    bearer = f"Bearer {SECRET}"
    assert len(Asked(server, "a", "keyed", headers={"authorization": bearer}).pieces()) == 1
    for way in ("generate", "generate_stream"):
        assert post(server, way, text_input="a", tenant="keyed", authorization=bearer, max_tokens=4)[0] == 200
        answer = post(server, way, text_input="a", tenant="keyed", authorization=f"{bearer}x", max_tokens=4)[1]
        assert "[no_tenant]" in json.dumps(answer)


def test_a_header_that_names_another_tenant_is_refused(server):
    assert len(Asked(server, "a", "plain", headers={"hplm-tenant": "plain"}).pieces()) == 1
    with pytest.raises(InferenceServerException, match=r"invalid_input.*hplm-tenant"):
        Asked(server, "a", "plain", headers={"hplm-tenant": "wide"}).pieces()


@pytest.mark.parametrize("bounds", [{"parameters": {"first_token_ms": 15_000}}, {"timeout": 15_000_000}])
def test_times_count_from_the_arrival_at_the_front_door(server, bounds):
    now_us = time.time_ns() // 1000
    with pytest.raises(InferenceServerException, match=r"\[deadline\]"):
        Asked(server, "a", "plain", headers={"hplm-arrived": str(now_us - 20_000_000)}, **bounds).pieces()
    assert Asked(server, "a", "plain", headers={"hplm-arrived": str(now_us + 20_000_000)}, **bounds).pieces()
    with pytest.raises(InferenceServerException, match=r"invalid_input.*hplm-arrived"):
        Asked(server, "a", "plain", headers={"hplm-arrived": "soon"}).pieces()


def test_a_key_opens_its_tenant_and_those_without_keys(server):
    for headers, expected in (({}, []), ({"authorization": f"Bearer {SECRET}"}, ["keyed"])):
        (answer,) = Asked(server, "", "nobody", {}, headers=headers, parameters={"hplm_tenants": True}).pieces()
        assert json.loads(answer["text_output"][0]) == sorted(["lora", "plain", "single", "wide", *expected])


def test_a_chosen_token_is_told_before_the_likeliest(server):
    sampling = {"max_tokens": 64, "seed": 1, "ignore_eos": True, "temperature": 0.1}
    (alone,) = Asked(server, "ab", "plain", {**sampling, "logprobs": 0}, **RETURN).pieces()
    (answer,) = Asked(server, "ab", "plain", {**sampling, "logprobs": 20}, **RETURN).pieces()
    told = [list(token) for token in json.loads(answer["logprobs"][0])]
    assert [token[0] for token in told] == [str(id) for id in ids_of([alone])]
    assert any(len(token) == 20 for token in told), "none of the chosen tokens is one of the likeliest"


def test_a_request_too_late_to_begin_is_refused_and_one_on_its_way_ends_with_what_there_is(server):
    assert _begun_in_time(server)[-1]["finish_reason"][0] == b"deadline"
    with pytest.raises(InferenceServerException) as caught:
        Asked(server, "a", "plain", GREEDY, timeout=1).piece()
    assert "[deadline]" in caught.value.message()
    for way in ("generate", "generate_stream"):
        answer = post(server, way, text_input="a", tenant="plain", timeout=1)[1]
        assert "[deadline]" in json.dumps(answer)
    assert post(server, "generate", text_input="a", tenant="plain", timeout=60_000_000)[0] == 200


def _begun_in_time(server):
    """Returns the pieces of a long answer whose time ends after some text. A slow machine gets more and more time for that."""
    for seconds in (0.3 * 2**number for number in range(8)):
        asked = Asked(server, "a", "plain", LONG, timeout=round(1e6 * seconds), stream=True, return_finish_reason=True)
        try:
            pieces = asked.pieces()
        except InferenceServerException as error:
            assert "[deadline]" in error.message()
            continue
        if text_of(pieces):
            return pieces
    raise AssertionError("no text has come")


def test_a_cancelled_stream_frees_what_it_held(server):
    before = cancelled(server)
    asked = Asked(server, "a", "single", LONG, stream=True)
    asked.piece()
    with pytest.raises(InferenceServerException) as caught:
        Asked(server, "a", "single").piece()
    assert "[quota]" in caught.value.message()
    asked.client.stop_stream(cancel_requests=True)
    eventually(lambda: cancelled(server) == before + 1)
    assert len(Asked(server, "a", "single").pieces()) == 1


def test_a_closed_http_connection_cancels_a_stream(server):
    before = cancelled(server)
    body = {"text_input": "a", "tenant": "single", "sampling_parameters": json.dumps(LONG), "stream": True}
    connection = http.client.HTTPConnection(server.http_url, timeout=PATIENCE)
    connection.request("POST", "/v2/models/chat/generate_stream", json.dumps(body))
    assert connection.getresponse().read(1)
    connection.close()
    eventually(lambda: cancelled(server) == before + 1)


def test_a_probe_is_answered_without_a_tenant(server):
    control = server.server.control()
    assert control.probe("chat", control.probes(["chat"])["chat"], PATIENCE).state is State.WORKS
    assert post(server, "generate", text_input="", hplm_probe=True)[1]["text_output"] == "ok"


def test_a_model_that_drains_refuses_and_ends_what_it_has(server):
    asked = Asked(server, "a", "plain", {**GREEDY, "max_tokens": 400}, stream=True, return_finish_reason=True)
    asked.piece()
    inherited.start_to_drain(server.server.id)
    try:
        with pytest.raises(InferenceServerException) as caught:
            Asked(server, "a", "plain").piece()
        assert "[draining]" in caught.value.message()
        assert asked.pieces()[-1]["finish_reason"][0] == b"length"
    finally:
        (SHARED_MEMORY / f"{server.server.id}-draining").unlink()


def test_a_killed_process_ends_each_of_its_answers_once_and_is_started_again(server):
    """Streams and whole answers, those that run and those that wait for room, over gRPC and HTTP."""
    ways = ("generate", {}), ("generate_stream", {"stream": True})
    with ThreadPoolExecutor(2) as pool:
        asked = [Asked(server, "a", "plain", LONG, stream=stream) for stream in (True, False)]
        asked[0].piece()
        body = {"text_input": "a", "tenant": "plain", "sampling_parameters": json.dumps(LONG)}
        posted = [pool.submit(post, server, way, **body, **more) for way, more in ways]
        eventually(lambda: server.held == 4)
        restarts = server.server.restarts
        server.kill("chat")
        supervisor = Supervisor(server.server, lambda said: None)
        eventually(lambda: supervisor.look() or server.server.restarts == restarts + 1)
        for one in asked:
            with pytest.raises(InferenceServerException):
                one.pieces()
            one.client.stop_stream()
            assert one.said.empty(), "something was said behind the end"
        for answer in posted:
            with pytest.raises((http.client.HTTPException, OSError)):
                answer.result(PATIENCE)
        assert len(Asked(server, "a", "plain").pieces()) == 1
        for way, more in ways:
            assert post(server, way, text_input="a", tenant="plain", max_tokens=4, **more)[0] == 200
