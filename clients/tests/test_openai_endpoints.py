"""The gateway's endpoints for encoders: requests, answers and errors in the forms of seven interfaces, before a fake Triton."""

import asyncio
import base64
import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from openai_fakes import ENCODED, LOGITS, Tenants, gateway

from hplm_openai.app import Gateway, RequestLimits
from hplm_openai.endpoints import CHATS, ENDPOINTS, OF_TENANT
from tests.support.message import mentions
from tests.support.needed import needs_program
from tests.support.wait import PATIENCE, eventually

CHANCES = {"good": 0.67, "bad": 0.25, "so": 0.08}


@pytest.fixture(scope="module")
def served():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tenants, "encoded", tuple(ENCODED))
        with gateway() as served:
            yield served


def near(value):
    """An answer whose numbers are single-precision."""
    if isinstance(value, dict):
        return {name: near(one) for name, one in value.items()}
    if isinstance(value, list):
        return [near(one) for one in value]
    return pytest.approx(value, abs=1e-6) if isinstance(value, float) else value


def labels(*scores):
    return [{"label": label, "score": score} for label, score in zip(CHANCES, scores, strict=False)]


def ask(served, path, **body):
    status, answer = served.post(path, **body)
    assert status == 200, answer
    if isinstance(answer, dict) and "id" in answer:
        prefix, _, own = answer.pop("id").partition("-")
        assert prefix and len(own) == 24 and answer.pop("model") == body["model"]
        answer.pop("created", None)
    return answer


def in_list(tokens, data):
    return {"object": "list", "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def sigmoid(number):
    return 1 / (1 + math.exp(-number))


def ranks(tells, most):
    results = [{"index": index, "relevance_score": sigmoid(number)} for index, number in RANKS[:most]]
    if tells:
        results = [{**one, "document": {"text": DOCUMENTS[one["index"]]}} for one in results]
    return {"results": results, "usage": {"prompt_tokens": 3, "total_tokens": 3}}


DOCUMENTS, RANKS = ["ab", "abcd", "a"], [(1, 3), (0, 1), (2, 0)]  # of the query `q`
RANKED = {"query": "q", "documents": DOCUMENTS}
FLAGS = {
    "flagged": True,
    "categories": {"good": True, "bad": True, "so": False},
    "category_scores": {"good": 0.75, "bad": 0.5, "so": 0.25},
    "category_applied_input_types": {"good": ["text"], "bad": ["text"], "so": ["text"]},
}
BY_LABEL = {"mood": [0.25, 0.67, 0.08], "flags": [0.5, 0.75, 0.25]}
VECTORS, ROOT = [[2, 0, -1], [1, 0, -1]], math.sqrt(5)
CODED = [base64.b64encode(np.float32(vector).tobytes()).decode() for vector in VECTORS]
TEXT = "Ada King met Bob \u200b"
ADA = {"entity_group": "PER-X", "score": 0.5, "word": "Ada King", "start": 0, "end": 8}
MET = {"entity_group": "O", "score": 0.5, "word": "met", "start": 9, "end": 12}
BOB = {"entity_group": "PER-X", "score": 0.5, "word": "Bob", "start": 13, "end": 16}
WORDS = [("B-PER-X", 0, 3), ("I-PER-X", 4, 8), ("B-PER-X", 13, 16)]
ASKED, FOUND = {"question": "Who?", "context": "It, Ada, did."}, {"answer": "Ada", "score": 0.75, "start": 4, "end": 7}
EXCHANGES = [  # a request of each form, and its answer but for id, model and time
    ("/v1/classifications", {"model": "mood", "input": ["a", "b"], "metadata": {"any": 1}},
     {"results": [{"mood": {"scores": CHANCES}}] * 2}),
    ("/v1/classifications", {"model": "flags", "input": "a"}, {"results": [{"flags": {"scores": FLAGS["category_scores"]}}]}),
    ("/v1/moderations", {"model": "flags", "input": "a"}, {"results": [FLAGS]}),
    *(("/classify", {"model": model, "input": ["a", "b"], "add_special_tokens": True, **raw}, in_list(2, [
        {"index": number, "label": "good", "probs": probs, "num_classes": 3} for number in range(2)
    ])) for model in BY_LABEL for raw, probs in (({}, BY_LABEL[model]), ({"use_activation": False}, LOGITS))),
    *((path, {"model": "vector", "input": ["ab", "a"], "user": "me", **form}, in_list(3, [
        {"object": kind, "index": number, name: vector} for number, vector in enumerate(vectors)
    ])) for path, kind, name in (("/v1/embeddings", "embedding", "embedding"), ("/pooling", "pooling", "data"))
     # the latter as langchain-openai 1.7 and llama-index-embeddings-openai 0.7 send it
     for form, vectors in (({}, VECTORS), ({"encoding_format": "base64"}, CODED))),
    *(("/score", {"model": "near", **given, **raw}, in_list(2, [
        {"index": number, "object": "score", "score": score} for number, score in enumerate(scores)
    ])) for given in (
        {"text_1": "a", "text_2": ["abc", "a"]}, {"queries": ["a"], "documents": ["abc", "a"]},
        {"queries": ["a", "b"], "items": ["abc", "a"]}, {"data_1": ["a", "b"], "data_2": ["abc", "a"]},
    ) for raw, scores in (({}, [sigmoid(2), 0.5]), ({"use_activation": False}, [2, 0]))),
    *((path, {"model": "near", **RANKED, **more}, ranks(tells, most)) for path, more, tells, most in (
        ("/rerank", {}, True, 3), ("/v1/rerank", {}, True, 3), ("/v2/rerank", {}, False, 3),
        ("/v1/rerank", {"return_documents": False}, False, 3), ("/v2/rerank", {"return_documents": True}, True, 3),
        ("/v1/rerank", {"documents": [{"text": text} for text in DOCUMENTS]}, True, 3),
        ("/v2/rerank", {"top_n": 2}, False, 2), ("/rerank", {"top_n": 0}, True, 3), ("/v1/rerank", {"top_n": 9}, True, 3),
    )),
    ("/models/near/rerank", {"query": "q", "texts": DOCUMENTS, "truncation_direction": "Right"},
     [{"index": index, "score": sigmoid(number)} for index, number in RANKS]),
    ("/models/near/rerank", {"query": "q", "texts": DOCUMENTS, "raw_scores": True, "return_text": True},
     [{"index": index, "score": number, "text": DOCUMENTS[index]} for index, number in RANKS]),
    *((path, {"inputs": "ab"}, [[2 / ROOT, 0.0, -1 / ROOT]]) for path in ("/models/vector/embed", "/models/vector")),
    ("/models/vector/embed", {"inputs": ["ab", "a"], "normalize": False}, VECTORS),
    ("/models/mood", {"inputs": "a", "parameters": {}, "options": {"wait_for_model": True}}, [labels(*CHANCES.values())]),
    ("/models/mood", {"inputs": ["a", "b"], "parameters": {"top_k": 1, "function_to_apply": "softmax"}}, [labels(0.67)] * 2),
    ("/models/flags", {"inputs": "a", "parameters": {"function_to_apply": "none"}}, [labels(1, 0, -1)]),
    ("/models/names", {"inputs": TEXT}, [ADA, BOB]),
    ("/models/names", {"inputs": [TEXT], "parameters": {"aggregation_strategy": "max"}}, [[ADA, BOB]]),
    ("/models/names", {"inputs": TEXT, "parameters": {"ignore_labels": []}}, [ADA, MET, BOB]),
    ("/models/names", {"inputs": TEXT, "parameters": {"aggregation_strategy": "none"}}, [
        {"entity": tag, "score": 0.5, "word": TEXT[start:end], "start": start, "end": end} for tag, start, end in WORDS
    ]),
    ("/models/find", {"inputs": ASKED, "parameters": {"handle_impossible_answer": True}}, FOUND),
    ("/models/find", {"inputs": [ASKED] * 2, "parameters": {"top_k": 1}}, [FOUND] * 2),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "answer"), EXCHANGES)
def test_a_request_of_each_form_gets_its_answer(served, path, body, answer):
    assert ask(served, path, **body) == near(answer)


@pytest.mark.parametrize(
    ("path", "body", "parameters"),
    [
        ("/v1/classifications", {"model": "mood", "input": "a"}, {"top_k": 65_535}),
        ("/classify", {"model": "mood", "input": "a", "truncate_prompt_tokens": -1}, {"truncate": True}),
        ("/v1/embeddings", {"model": "vector", "input": "a", "dimensions": 3}, {"dimensions": 3}),
        ("/pooling", {"model": "vector", "input": "a", "prompt_name": "query"}, {"hplm_prefix": "query"}),
        (
            "/models/vector",
            {"inputs": "a", "prompt_name": "query", "truncate": True},
            {"hplm_prefix": "query", "truncate": True},
        ),
    ],
)
def test_fields_become_parameters(served, path, body, parameters):
    ask(served, path, **body)
    assert parameters.items() <= served.asked.parameters.items()


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/embeddings", {"model": "vector", "input": "a", "encoding_format": "bytes"}, ["encoding_format"]),
        ("/pooling", {"model": "vector", "input": "a", "encoding_format": "bytes"}, ["encoding_format"]),
        ("/models/mood", {"inputs": "a", "parameters": {"function_to_apply": "sigmoid"}}, ["sigmoid", "softmax"]),
        ("/models/find", {"inputs": ASKED, "parameters": {"top_k": 2}}, ["top_k"]),
        ("/models/find", {"inputs": {"question": "Who?"}}, ["context"]),
        ("/models/find", {"inputs": "Who?"}, ["question"]),
        ("/models/find", {"inputs": []}, ["inputs"]),
        ("/score", {"model": "near", "text_1": ["a", "b"], "text_2": ["a"]}, ["text_1", "text_2", 2, 1]),
        *(("/v2/rerank", {"model": "near", "query": "q", "documents": ["a"], "top_n": given}, ["top_n"])
          for given in (-1, "2", 1.5)),
        *(("/v1/embeddings", {"model": "vector", "input": ids}, ["input", "check_embedding_ctx_length=False"])
          for ids in ([1, 2], [[1, 2], [3]], [[]])),
        ("/v1/embeddings", {"model": "vector", "input": [1, "a"]}, ["input", "text"]),
        ("/classify", {"model": "mood", "input": ["a"] * 2049}, ["2,048"]),
        ("/classify", {"model": "near", "input": "a"}, ["near", "/score", "/v2/rerank"]),
        ("/v2/rerank", {"model": "mood", **RANKED}, ["mood", "/classify", "/models/mood"]),
        ("/predict", {"model": "open", "inputs": "a"}, ["open", "/v1/chat/completions"]),
        ("/v1/completions", {"model": "mood", "prompt": "a"}, ["mood", "/v1/classifications"]),
        *((path, {**body, name: value}, [name])
          for path, body in (("/models/mood/classify", {"input": "a"}), ("/models/flags/v1/classifications", {"input": "a"}),
                             ("/models/near/rerank", RANKED))
          for name, value in (("messages", []), ("dimensions", 3), ("truncation_side", "left"), ("truncate_prompt_tokens", 9))),
        *(("/models/mood/predict", {"inputs": inputs}, ["inputs", "validation"]) for inputs in (
            None, 1, [], [1], ["a", 1], ["a", "b", "c"], [[]], [["a"], ["b", "c"]], [["a"], "b"], [["a"]] * 2049,
        )),
    ],
)  # fmt: skip
def test_a_request_that_is_wrong_is_refused_with_the_field(served, path, body, named):
    status, answer = served.post(path, **body)
    assert status == 400 and mentions(json.dumps(answer), *named) and len(json.dumps(answer)) < 1000


@pytest.mark.parametrize(
    ("inputs", "texts", "pairs", "is_one"),
    [
        ("a", ["a"], None, True),
        (["a"], ["a"], None, True),
        (["a", "b"], ["a"], ["b"], True),
        ([["a"], ["b"]], ["a", "b"], None, False),
        ([["a", "b"], ["c", "d"]], ["a", "c"], ["b", "d"], False),
    ],
)
def test_predict_reads_texts_and_pairs(served, inputs, texts, pairs, is_one):
    expected = labels(*CHANCES.values())
    headers = {"hplm-tenant": "mood"}
    assert served.post("/predict", headers, inputs=inputs)[1] == near(expected if is_one else [expected] * len(texts))
    assert served.asked.inputs == {"TEXT": texts, **({"TEXT_PAIR": pairs} if pairs else {})}
    assert served.post("/predict", headers, inputs="a", raw_scores=True)[1] == labels(1, 0, -1)


TEXTS, INPUTS = {"input": "a"}, {"inputs": "a"}
BODIES = {
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/v1/classifications", "/v1/moderations", "/classify"), TEXTS),
    **dict.fromkeys(("/predict", "/embed"), INPUTS), **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RANKED),
    "/score": {"text_1": "a", "text_2": "b"}, "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}  # fmt: skip


@pytest.mark.parametrize("path", [path for path in (*CHATS, *ENDPOINTS) if path != OF_TENANT])
def test_a_tenant_is_named_by_the_field_the_header_or_the_path(served, path):
    tenant = "open" if path in CHATS else next(name for name, one in ENCODED.items() if one[0] in ENDPOINTS[path].tasks)
    body, own = BODIES[path], {"hplm-tenant": tenant}
    for way in (
        (path, None, {"model": tenant}),
        (path, own, {}),
        (f"/models/{tenant}{path}", None, {}),
        (f"/models/{tenant}{path}", None, {"model": "dummy"}),  # as huggingface_hub's `chat_completion`
        (path, own, {"model": tenant}),
    ):
        status, answer = served.post(way[0], way[1], **way[2], **body)
        assert status == 200, answer
        assert served.asked.parameters["tenant"] == served.asked.headers["hplm-tenant"] == tenant
    for headers, more, named in ((None, {}, "hplm-tenant"), (own, {"model": "other"}, "other"), (None, {"model": 5}, "name")):
        status, answer = served.post(path, headers, **more, **body)
        assert status == 400 and mentions(json.dumps(answer), named)


def test_our_own_fields_the_id_and_the_time_of_arrival_reach_the_server(served):
    headers = {"x-request-id": "one", "hplm-arrived": "1800000000000000", "Authorization": "Bearer secret"}
    more = {"deadline_ms": 60_000, "truncate": True, "priority": -2}
    assert served.post("/classify", headers, model="mood", input="a", **more)[0] == 200
    asked, own = served.asked, ("hplm-arrived", "truncate", "hplm_priority")
    assert {name: asked.parameters[name] for name in own} == {
        "hplm-arrived": "1800000000000000",
        "truncate": True,
        "hplm_priority": -2,
    }
    assert 50_000_000 < asked.parameters["timeout"] <= 60_000_000 and asked.id == "one"
    assert asked.headers["authorization"] == "Bearer secret"


FORMS = {
    "/v1/classifications": ({"object", "message", "type", "param", "code"}, "message"),
    "/predict": ({"error", "error_type"}, "error"),
    "/models/mood": ({"error"}, "error"),
    "/v2/rerank": ({"message", "detail", "code"}, "message"),
    "/v1/rerank": ({"message", "detail", "code"}, "detail"),
}


@pytest.mark.parametrize("path", FORMS)
def test_errors_have_the_form_of_their_interface(served, path):
    names, message = FORMS[path]
    name = {} if path.startswith("/models") else {"model": "nobody"}
    for way, headers, status, named in (
        (path.replace("mood", "nobody"), {}, 401, "key"),
        (path.replace("mood", "nobody"), {"Authorization": "Bearer x"}, 404, "key"),
        (path, {"Authorization": "Basic x"}, 401, "Bearer"),
        (path, {"x-request-id": "a b"}, 400, "x-request-id"),
    ):
        found, answer = served.post(way, headers, input="a", **name)
        assert (found, answer.keys()) == (status, names) and mentions(answer[message], named)


@pytest.mark.parametrize(
    ("said", "status", "kind"), [("[queue_full] retry after 2 s", 503, "overloaded"), ("[internal] a", 500, "backend")]
)
def test_errors_of_the_server_are_told_with_their_status(served, said, status, kind):
    found, headers, answer = served.send("POST", "/models/mood/predict", {"inputs": said})
    assert found == status and json.loads(answer)["error_type"] == kind
    assert status == 500 or headers["retry-after"] == "2"


def test_long_lists_are_answered_in_order_up_to_a_limit(served):
    texts = ["a" * (number % 999) for number in range(2048)]
    answer = ask(served, "/score", model="near", text_1="", text_2=texts, use_activation=False)
    assert [one["score"] for one in answer["data"]] == [*map(len, texts)]


LONG = [[0.5, -0.25]] * 2048


@pytest.mark.parametrize(
    "answer", [LONG, {"id": "a", "data": [{"embedding": one} for one in LONG], "usage": {"é": None}}, [], {}]
)
def test_other_requests_go_on_while_a_long_answer_is_written(answer):
    class Answering:
        async def infer(self, *_, **__):
            return answer

        async def close(self):
            pass

    async def written():
        """Returns the body, and how often the event loop turned meanwhile."""
        gateway, parts, turns = Gateway(Answering, RequestLimits()), [], 0
        scope = {"type": "http", "method": "POST", "path": "/models/a/embed", "headers": [], "query_string": b""}
        messages = iter([{"type": "http.request", "body": b"{}"}])

        async def receive():
            return next(messages, None) or await asyncio.Future()

        async def send(part):
            parts.append(part.get("body", b""))

        async with gateway._lifespan(None):
            asked = asyncio.create_task(gateway.app()(scope, receive, send))
            while not asked.done():
                await asyncio.sleep(0)
                turns += 1
            await asked
        return b"".join(parts), turns

    body, turns = asyncio.run(written())
    assert json.loads(body) == answer and turns >= (len(LONG) if answer else 0)


def test_a_client_that_goes_frees_its_place():
    with gateway(at_once=1) as served:
        connection = served.connect()
        connection.request("POST", "/classify", json.dumps({"model": "mood", "input": "wait"}))
        eventually(lambda: served.triton.requests)
        status, answer = served.post("/models/mood/predict", inputs="a")
        assert (status, answer["error_type"]) == (503, "overloaded") and mentions(answer["error"], "retry after")
        connection.close()
        eventually(lambda: served.post("/models/mood/predict", inputs="a")[0] == 200)
        served.triton.held.set()


def test_a_body_that_is_too_large_is_refused_in_the_form_of_the_interface():
    with gateway(largest_body=1000) as served:
        status, answer = served.post("/models/mood/predict", inputs="a" * 1000)
        assert (status, answer["error_type"]) == (413, "validation") and mentions(answer["error"], "1,000")


@needs_program("curl")
def test_the_commands_of_the_page_are_answered(served):
    page = (Path(__file__).parents[2] / "docs/openai.md").read_text("utf-8")
    named = {"localhost:9000": served.address, "stdlib-area": "mood", "luna": "open"}
    commands = re.findall(r"^(curl .*(?:\n  .*)*)", page, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        for name, own in named.items():
            command = command.replace(name, own)
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0 and done.stdout and "error" not in done.stdout, (command, done)


class Two(Tenants):
    """Two encoders that have the tenant `mood`, with different tasks."""

    models = frozenset(f"{name}{part}" for name in ("labels", "vectors") for part in ("", "-lookup", "-upper"))

    def take(self, request):
        if "hplm_tenants" in request.parameters:
            task = "classify" if request.model == "labels" else "embed"
            return {"LABEL": np.array([[json.dumps([{"tenant": "mood", "task": task}]).encode()]], np.object_)}
        return super().take(request)


def test_of_tenants_with_the_same_name_the_one_with_the_task_answers():
    with gateway(fake=Two) as served:
        for path, backbone in (("classifications", "labels"), ("embeddings", "vectors"), ("classifications", "labels")):
            assert served.post(path, model="mood", input="a")[0] == 200 and served.asked.model == backbone
        status, answer = served.post("/score", model="mood", text_1="a", text_2="b")
        assert status == 400 and mentions(answer["error"]["message"], "mood", "classify", "/v1/classifications")
