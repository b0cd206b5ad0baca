"""The gateway's interface: OpenAI's forms of requests, answers, streams and errors, and its limits."""

import gzip
import http.client
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai_fakes import Tenants, gateway

from hplm_client.errors import Draining
from hplm_openai.completion_request import CompletionRequest
from hplm_openai.errors import refusal
from hplm_openai.requests import SAMPLING
from tests.support.message import mentions
from tests.support.wait import eventually

COMMON = {"created", "id", "model", "object", "choices"}


@pytest.fixture(scope="module")
def served():
    with gateway(largest_body=100_000) as served:
        yield served


def events(lines):
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error_in(answer):
    (error,) = answer.values()
    assert error.keys() == {"message", "type", "param", "code"} and "127.0.0.1" not in error["message"]
    return error


def test_a_completion(served):
    status, answer = served.complete(max_tokens=3, temperature=0.5, stop=["x"], seed=1, user="me", top_k=None, best_of=1)
    assert status == 200 and answer.keys() == COMMON | {"usage"}
    assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", "open", "cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert served.sampling == {"max_tokens": 3, "temperature": 0.5, "stop": ["x"], "seed": 1}
    assert "authorization" not in served.asked.headers


def test_a_completion_in_a_stream(served):
    status, lines = served.complete(stream=True, n=2, stream_options={"include_usage": True})
    *chunks, last = events(lines)
    assert status == 200 and {chunk["id"] for chunk in chunks} == {last["id"]}
    assert all(chunk["object"] == "text_completion" and chunk["usage"] is None for chunk in chunks)
    told = [chunk["choices"][0] for chunk in chunks]
    assert [(one["index"], one["text"], one["finish_reason"]) for one in told] == [
        (0, "a", None), (1, "a", None), (0, "b", None), (1, "b", None), (0, "c", "length"), (1, "c", "length"),
    ]  # fmt: skip
    assert last["choices"] == [] and last["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert all("usage" not in chunk for chunk in events(served.complete(stream=True)[1]))


def test_a_chat(served):
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "hé"}, {"type": "text", "text": "llo"}]},
    ]
    status, answer = served.chat(messages=messages, response_format={"type": "text"}, tools=[])
    assert status == 200 and answer.keys() == COMMON | {"usage"}
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    message = {"role": "assistant", "content": "héllo", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    arrived = json.loads(served.asked.inputs["messages"][0])
    assert arrived == [{"role": "system", "content": "be short"}, {"role": "user", "content": "héllo"}]
    assert served.sampling == {"max_tokens": 256}
    served.chat(max_completion_tokens=9)
    assert served.sampling == {"max_tokens": 9}


def test_a_chat_in_a_stream(served):
    status, lines = served.chat(stream=True)
    told = [chunk["choices"][0] for chunk in events(lines)]
    assert status == 200 and json.loads(lines[0])["object"] == "chat.completion.chunk"
    assert [one["delta"] for one in told] == [{"role": "assistant", "content": "a"}, {"content": "b"}, {"content": "c"}]
    assert [one["finish_reason"] for one in told] == [None, None, "length"]
    assert served.complete("late")[1]["choices"][0]["finish_reason"] == "length", "cut off by its deadline"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(served, stream):
    answer = served.complete("水 b\ufffd", logprobs=1, stream=stream)[1]
    told = [one["choices"][0]["logprobs"] for one in (events(answer) if stream else [answer])]
    joined = {name: [value for one in told for value in one[name]] for name in told[0]}
    assert joined == {
        "tokens": ["\ufffd", "", "b", "\ufffd"],
        "token_logprobs": [-2.0] * 4,
        "top_logprobs": [{"x": -0.25, token: -2.0} for token in ("\ufffd", "", "b", "\ufffd")],
        "text_offset": [0, 0, 2, 3],
    }


def test_logprobs_of_a_chat(served):
    likeliest = [{"token": "x", "logprob": -0.25, "bytes": [120]}, {"token": "y", "logprob": -1.25, "bytes": [121]}]
    (choice,) = served.chat("é", logprobs=True, top_logprobs=2)[1]["choices"]
    (token,) = choice["logprobs"]["content"]
    assert token == {"token": "é", "logprob": -2.0, "bytes": [195, 169], "top_logprobs": likeliest}
    (choice,) = served.chat("\ufffd", logprobs=True)[1]["choices"]
    (token,) = choice["logprobs"]["content"]
    assert token == {"token": "\ufffd", "logprob": -2.0, "bytes": None, "top_logprobs": []}


def test_every_setting_and_our_own_fields_reach_the_decoder(served):
    arrived = {"hplm-arrived": "1800000000000000"}  # at the front door
    settings = dict.fromkeys(SAMPLING, 1)
    more = {"truncate": True, "priority": -2}
    assert served.complete(deadline_ms=1.5, **settings, **more, _headers=arrived)[0] == 200
    assert served.sampling == settings
    assert served.asked.parameters == {
        "tenant": "open", "timeout": 1500, "truncate": True, "hplm_priority": -2, **arrived,
    }  # fmt: skip


def test_a_response_format_reaches_the_decoder_as_a_setting(served):
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    as_schema = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    for asked, setting in (({"type": "json_object"}, {"json_object": True}), (as_schema, {"json": schema})):
        for ask in (served.chat, served.complete):
            assert ask(response_format=asked)[0] == 200 and served.sampling["structured_outputs"] == setting
    assert list(served.sampling["structured_outputs"]["json"]["properties"]) == ["b", "a"], "answers have this order"
    said = "'structured_outputs' is not possible: Invalid type: objekt"
    for fields, param in (
        ({"response_format": as_schema}, "response_format"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs"),
    ):
        error = error_in(served.chat(said, model="strict", **fields)[1])
        assert error["param"] == param and f"'{param}' is" in error["message"]


def test_a_refused_tool_names_the_way_out(served):
    assert "'response_format'" in error_in(served.chat(tools=[{"type": "function"}])[1])["message"]


def test_the_key_goes_to_the_server_and_opens_models(served):
    bearer = {"Authorization": "Bearer secret"}
    assert served.complete(model="keyed", _headers=bearer)[0] == 200
    assert served.asked.headers["authorization"] == "Bearer secret"
    assert "secret" not in repr(CompletionRequest(key="secret")), "a log may show it"
    for headers, ids in (
        (bearer, ["keyed", "mood", "open"]),
        ({}, ["mood", "open"]),
        ({"Authorization": "Bearer x"}, ["mood", "open"]),
    ):
        status, _, listed = served.send("GET", "/v1/models", **headers)
        assert status == 200 and [model["id"] for model in json.loads(listed)["data"]] == ids
    ours = {"object": "model", "created": 0}
    encoder, decoder = json.loads(listed)["data"]
    assert encoder == {"id": "mood", "owned_by": "minilm", "task": "classify", **ours}
    assert decoder == {"id": "open", "owned_by": "chat", "task": "generate", **ours}
    assert json.loads(served.send("GET", "/v1/models/mood")[2]) == {**encoder, "labels": ["bad", "good", "so"]}
    for name, headers, status, code in (
        ("open", {}, 200, None), ("keyed", bearer, 200, None), ("keyed", {}, 401, "invalid_api_key"),
        ("nobody", bearer, 404, "model_not_found"), ("a/b", bearer, 404, "model_not_found"), ("", {}, 400, "invalid_input"),
    ):  # fmt: skip
        found, _, answer = served.send("GET", f"/v1/models/{name}", **headers)
        assert found == status and (status == 200 or error_in(json.loads(answer))["code"] == code), name


def test_fields_that_ask_for_nothing_here_are_taken(served):
    message = {"role": "user", "content": "abc", "name": "ada"}
    ignored = {
        "metadata": {"a": "b"}, "service_tier": "flex", "store": True, "parallel_tool_calls": True, "user": "me",
        "reasoning_effort": "low", "verbosity": "low", "prompt_cache_key": "k", "safety_identifier": "s",
        "stream_options": {"include_obfuscation": False}, "stream": True,
    }  # fmt: skip
    neutral = {"top_logprobs": 0, "tool_choice": "auto", "stop": "", "skip_special_tokens": True, "add_generation_prompt": True}
    status, lines = served.chat(messages=[message], **ignored, **neutral)
    assert status == 200 and events(lines) and served.sampling == {"max_tokens": 256}
    assert json.loads(served.asked.inputs["messages"][0]) == [{"role": "user", "content": "abc"}]
    assert "user" not in served.asked.parameters


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_choices_in_order_and_an_error_of_one_is_that_of_all(served, stream):
    status, answer = served.complete(
        ["abc", "de"], n=2, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    told = [one for chunk in (events(answer) if stream else [answer]) for one in chunk["choices"]]
    texts = {number: "".join(one["text"] for one in told if one["index"] == number) for number in range(4)}
    assert status == 200 and texts == {0: "abc", 1: "abc", 2: "de", 3: "de"}
    assert stream or [one["index"] for one in told] == [0, 1, 2, 3]
    usage = (events(answer)[-1] if stream else answer)["usage"]
    assert usage == {"prompt_tokens": 8, "completion_tokens": 10, "total_tokens": 18}
    status, answer = served.complete(["'seed' is bad"] * 2, model="strict", stream=stream)
    assert status == 400 and error_in(answer)["param"] == "seed"


def test_numbers_of_settings_may_be_text_as_at_the_decoder(served):
    status, answer = served.complete(["abc", "de"], n="2", logprobs="1")
    assert status == 200 and [one["index"] for one in answer["choices"]] == [0, 1, 2, 3], answer
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 2
    status, answer = served.chat("é", logprobs=True, top_logprobs="1")
    (token,) = answer["choices"][0]["logprobs"]["content"]
    assert status == 200 and len(token["top_logprobs"]) == 1


def test_a_request_has_an_id_which_its_answer_tells_and_the_server_gets(served, caplog):
    for stream in (False, True):
        body = {"model": "open", "prompt": "a", "stream": stream}
        assert served.send("POST", "/v1/completions", body, x_request_id="ours-7")[1]["x-request-id"] == "ours-7"
        assert served.asked.id == "ours-7"
        assert served.send("POST", "/v1/completions", body)[1]["x-request-id"] == served.asked.id != "ours-7"
    for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("GET", "/v1/nothing"), ("POST", "/v1/completions")):
        assert served.send(method, path, x_request_id="ours-7")[1]["x-request-id"] == "ours-7"
    served.send("POST", "/v1/completions", {"model": "lost", "prompt": "a"}, x_request_id="ours-8")
    assert any("ours-8" in record.getMessage() for record in caplog.records), "the log says to which request an error belongs"
    for wrong in ("a b", "x" * 300):
        status, headers, answer = served.send("GET", "/v1/models", x_request_id=wrong)
        assert status == 400 and error_in(json.loads(answer)) and headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("header", ["secret", "Basic secret", "Bearer s\xe9cret"])
def test_a_header_that_holds_no_key_is_refused(served, header):
    for method, path in (("GET", "models"), ("POST", "completions")):
        status, _, answer = served.send(method, f"/v1/{path}", authorization=header)
        assert status == 401 and error_in(json.loads(answer))["code"] == "invalid_api_key"


def test_without_a_key_an_unknown_model_looks_like_one_that_needs_a_key(served):
    unknown, keyed = served.complete(model="nobody"), served.complete(model="keyed")
    assert unknown == keyed and unknown[0] == 401 and error_in(unknown[1])["code"] == "invalid_api_key"
    bearer = {"Authorization": "Bearer x"}
    unknown, keyed = (served.complete(model=model, _headers=bearer) for model in ("nobody", "keyed"))
    assert unknown == keyed and unknown[0] == 404 and error_in(unknown[1])["code"] == "model_not_found"


ERRORS = {
    "invalid_input": 400, "queue_full": 503, "draining": 503, "deadline": 503, "broken": 500, "crashed": 500,
    "quarantined": 503, "internal": 500, "capacity": 503,
}  # fmt: skip
KINDS = {"invalid_input": "invalid_request_error", "quota": "rate_limit_error"}


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [*((word, status, word) for word, status in ERRORS.items()), ("quota", 429, "rate_limit_exceeded"), ("lost", 502, None),
     ("odd", 500, "internal")],
)  # fmt: skip
def test_errors_have_openai_s_form_and_say_when_to_come_again(served, model, status, code):
    for stream in (False, True):
        found, headers, answer = served.send("POST", "/v1/completions", {"model": model, "prompt": "a", "stream": stream})
        error = error_in(json.loads(answer))
        assert (found, error["code"], error["type"]) == (status, code, KINDS.get(model, "server_error"))
        if model in ("quota", "invalid_input"):
            assert mentions(error["message"], 1.5) and "[" not in error["message"]
        if model == "quota":
            assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1500")
        if model == "draining":
            assert headers["retry-after"] in ("1", "2")
        if model in ("deadline", "capacity", "crashed", "quarantined"):  # else OpenAI's client would send it again
            assert headers["x-should-retry"] == "false" and "retry-after" not in headers


@pytest.mark.parametrize(("model", "logged"), [("quota", 0), ("stopped", 0), ("lost", 1), ("cut", 1)])
def test_a_stream_that_breaks_ends_with_an_error_which_is_logged_if_it_has_no_word(served, caplog, model, logged):
    status, lines = served.complete(model=model, stream=True)
    assert len([record for record in caplog.records if record.name.startswith("hplm_openai")]) == logged
    if model in ("stopped", "cut"):
        assert status == 200 and len(lines) == 2 and "error" not in json.loads(lines[0])
        assert error_in(json.loads(lines[1]))["type"] == "server_error"


WRONG = {  # values of the other documented fields: tests/refusals/test_contract.py
    "completions": [
        ({"model": None}, "model"), ({"model": ""}, "model"), ({"model": "m" * 1000}, "model"), ({"model": "open\0x"}, "model"),
        ({"best_of": 3}, "best_of"), ({"temprature": 1}, "temprature"), ({"messages": []}, "messages"),
        ({"x" * 1000: 1}, "x" * 256),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        *(({"stream": True, "stream_options": given}, "stream_options") for given in ({"a": 1}, [])),
        ({"stream": True, "stream_options": {"include_usage": 5}}, "include_usage"),
    ],
    "chat/completions": [
        *(({"messages": given}, "messages") for given in ("hi", [])),
        *(({"messages": [given]}, "messages[0]") for given in (
            "hi", {"role": "user"}, {"content": "a"},
            *({"role": "user", "content": [part]} for part in ("a", {"type": "text", "text": 5}, {"type": "image_url"})),
        )),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "a", "id": "b"}]}, "messages[1]"),
        ({"tool_choice": "required"}, "tool_choice"), ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        *(({"response_format": given}, "response_format") for given in (
            "json_object", [], {"type": "json"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "n"}},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": []}},
        )),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"prompt": "a"}, "prompt"), ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param"), [(path, *one) for path, wrong in WRONG.items() for one in wrong])
def test_a_wrong_field_is_named(served, path, fields, param):
    status, answer = (served.chat if "chat" in path else served.complete)(**fields)
    assert status == 400 and error_in(answer)["param"] == param and len(answer["error"]["message"]) < 1000
    assert "chat" in path or param[:100] in answer["error"]["message"] or param in ("model", "prompt")


@pytest.mark.parametrize(
    ("said", "fields", "param"),
    [
        *(("'max_tokens' is 0: Expected `int` >= 1", {name: 0}, name) for name in ("max_tokens", "max_completion_tokens")),
        ("'logprobs' is 21: Expected `int` <= 20", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("'logit_bias' names token 9", {"logit_bias": {"9": 1}}, "logit_bias"),
        ("the prompt has 9 characters", {}, None),
    ],
)
def test_a_setting_that_the_server_refuses_is_named_as_in_the_request(served, said, fields, param):
    for stream in (False, True):
        status, answer = served.chat(said, model="strict", stream=stream, **fields)
        error = error_in(answer)
        assert status == 400 and error["param"] == param and (param or "prompt") in error["message"]


def test_a_refusal_says_that_max_tokens_is_the_gateway_s_own(served):
    said = "a prompt of 9 tokens and 'max_tokens' 256 are too many"
    for fields, is_own in (({}, True), ({"max_tokens": 256}, False), ({"max_completion_tokens": 256}, False)):
        error = error_in(served.chat(said, model="strict", **fields)[1])
        assert ("default" in error["message"]) == is_own


BAD_BODIES = [
    b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 90_000, b'{"a":' * 15_000, b'{"prompt": NaN}', b'{"prompt": "\\ud800"}',
    b'{"seed": ' + b"9" * 9000 + b"}",
]  # fmt: skip


def test_bodies_that_are_no_json_objects_large_or_compressed_are_refused(served):
    for path in ("completions", "chat/completions"):
        for body in BAD_BODIES:
            status, _, answer = served.send("POST", f"/v1/{path}", body)
            assert status == 400 and error_in(json.loads(answer))["type"] == "invalid_request_error", body[:50]
    status, answer = served.complete("a" * 200_000)
    assert status == 413 and mentions(answer["error"]["message"], "100,000")
    connection = served.connect()
    connection.request("POST", "/v1/completions", iter([b"a" * 60_000] * 2), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert served.send("POST", "/v1/completions", gzip.compress(b"{}"), content_encoding="gzip")[0] == 415


def test_other_paths_and_methods_are_not_there(served):
    assert served.send("GET", "/health")[0] == 200
    for method, path, status in (("GET", "/", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/audio", 404)):
        found, _, answer = served.send(method, path)
        assert found == status and error_in(json.loads(answer))["message"]
    assert served.send("GET", "/v1/completions")[1]["allow"] == "POST"
    assert {*served.send("POST", "/v1/models")[1]["allow"].split(", ")} == {"GET", "HEAD"}


@pytest.mark.parametrize(
    "said",
    [
        "a prompt of 9 tokens and 'max_tokens' 256 are more than the 64 that the model takes: shorten the prompt",
        "the prompt has 9,000 characters, but 1,024 are read at most: shorten it",
        "'messages' have 9,000 characters, but 1,024 are read at most: leave out old ones",
    ],
)
def test_a_prompt_that_is_too_long_has_openai_s_code(served, said):
    for ask, field in ((served.complete, "prompt"), (served.chat, "messages")):
        status, answer = ask(said, model="strict")
        assert status == 400 and (error_in(answer)["code"], answer["error"]["param"]) == ("context_length_exceeded", field)


def test_a_draining_server_says_when_to_come_again():
    asked = CompletionRequest()
    assert refusal(Draining("[draining] no hint"), asked).headers == {"retry-after": "1", "retry-after-ms": "1000"}
    assert refusal(Draining("[draining] retry after 3 s"), asked).headers["retry-after"] == "3"


def test_before_encoders_only_a_prompt_is_refused(monkeypatch):
    monkeypatch.setattr(Tenants, "models", frozenset({"minilm", "minilm-lookup", "minilm-upper"}))
    with gateway() as served:
        status, answer = served.complete()
        assert status == 401 and error_in(answer)["code"] == "invalid_api_key"
        status, answer = served.complete(model="mood")
        assert status == 400 and mentions(error_in(answer)["message"], "classify", "/v1/classifications")
        assert json.loads(served.send("GET", "/v1/models")[2])["data"][0]["id"] == "mood"


@pytest.mark.parametrize("stream", [False, True])
def test_more_requests_than_may_be_on_their_way_are_refused_and_a_client_that_goes_frees_its_place(stream):
    with gateway(at_once=1) as served:
        connection = served.connect()
        connection.request("POST", "/v1/completions", json.dumps({"model": "slow", "prompt": "ab", "stream": stream}))
        eventually(lambda: served.triton.requests)
        status, answer = served.complete()
        assert status == 503 and error_in(answer)["code"] == "queue_full"
        assert served.send("GET", "/health")[0] == 200
        if stream:
            assert connection.getresponse().read(1)
        connection.close()
        eventually(served.asked.gone.is_set)
        eventually(lambda: served.complete()[0] == 200)


def test_a_triton_that_is_gone_is_503():
    with gateway("127.0.0.1:1") as served:
        answers = served.send("GET", "/health"), served.send("GET", "/v1/models"), served.complete()
        assert [status for status, *_ in answers] == [503] * 3


def test_answers_on_their_way_are_whole_when_the_gateway_stops():
    with ThreadPoolExecutor(1) as pool:
        with gateway() as served:
            connection = served.connect()
            connection.request("POST", "/v1/completions", json.dumps({"model": "open", "prompt": "ab" * 500, "stream": True}))
            read = pool.submit(connection.getresponse().read)
        assert read.result().endswith(b"data: [DONE]\n\n")
    with pytest.raises((ConnectionRefusedError, http.client.HTTPException)):
        served.complete()
