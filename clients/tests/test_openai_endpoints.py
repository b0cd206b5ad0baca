"""The gateway's endpoints for encoders: requests, answers and errors in the forms of seven interfaces, before a fake Triton."""

import base64
import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from openai_fakes import ENCODED, LOGITS, Tenants, gateway

from hplm_openai.endpoints import ENDPOINTS
from tests.support.message import mentions
from tests.support.needed import needs_program
from tests.support.wait import PATIENCE, eventually

TOTAL = sum(map(math.exp, LOGITS))
SOFTMAX = [math.exp(one) / TOTAL for one in LOGITS]
SIGMOID = [1 / (1 + math.exp(-one)) for one in LOGITS]
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
    return [{"label": label, "score": score} for label, score in zip(("good", "bad", "so"), scores, strict=True)]


def ask(served, path, **body):
    status, answer = served.post(path, **body)
    assert status == 200, answer
    if isinstance(answer, dict) and "id" in answer:
        prefix, _, own = answer.pop("id").partition("-")
        assert prefix and len(own) == 24 and answer.pop("model") == body["model"]
        answer.pop("created", None)
    return answer


def usage(tokens):
    return {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def test_classifications_have_the_scores_of_all_labels(served):
    answer = ask(served, "classifications", model="mood", input=["a", "b"], metadata={"any": 1})
    assert answer == near({"results": [{"mood": {"scores": CHANCES}}] * 2})
    assert ask(served, "classifications", model="flags", input="a")["results"][0]["flags"]["scores"]["so"] == 0.25
    assert served.asked.parameters["top_k"] == 65_535


def test_moderations_flag_labels_from_one_half_on(served):
    (result,) = ask(served, "moderations", model="flags", input="a")["results"]
    assert result == near(
        {
            "flagged": True,
            "categories": {"good": True, "bad": True, "so": False},
            "category_scores": {"good": 0.75, "bad": 0.5, "so": 0.25},
            "category_applied_input_types": {"good": ["text"], "bad": ["text"], "so": ["text"]},
        }
    )


@pytest.mark.parametrize(("model", "probs"), [("mood", SOFTMAX), ("flags", SIGMOID)])
def test_classify_has_probabilities_in_the_order_of_the_labels(served, model, probs):
    answer = ask(served, "/classify", model=model, input=["a", "b"], truncate_prompt_tokens=-1, add_special_tokens=True)
    told = [{"index": number, "label": "good", "probs": probs, "num_classes": 3} for number in range(2)]
    assert answer == near({"object": "list", "data": told, **usage(2)})
    assert served.asked.parameters["truncate"] is True
    assert ask(served, "/classify", model=model, input="a", use_activation=False)["data"][0]["probs"] == LOGITS


def floats(coded):
    return np.frombuffer(base64.b64decode(coded), "<f4").tolist()


@pytest.mark.parametrize(
    ("path", "kind", "name"), [("/v1/embeddings", "embedding", "embedding"), ("/pooling", "pooling", "data")]
)
def test_vectors_as_numbers_and_coded(served, path, kind, name):
    more = {"dimensions": 3, "prompt_name": "query", "user": "me"}
    answer = ask(served, path, model="vector", input=["ab", "a"], **more)
    vectors = [[2, 0, -1], [1, 0, -1]]
    told = [{"object": kind, "index": number, name: vector} for number, vector in enumerate(vectors)]
    assert answer == {"object": "list", "data": told, **usage(3)}
    parameters = served.asked.parameters
    assert (parameters["dimensions"], parameters["hplm_prefix"]) == (3, "query")
    answer = ask(served, path, model="vector", input="ab", encoding_format="base64")
    assert floats(answer["data"][0][name]) == vectors[0]
    status, answer = served.post(path, model="vector", input="ab", encoding_format="bytes")
    assert status == 400 and answer["error"]["param"] == "encoding_format"


def test_requests_as_langchain_openai_1_7_and_llama_index_embeddings_openai_0_7_send_them(served):
    recorded = b'{"model":"vector","input":["a b","c d"],"encoding_format":"base64"}'
    status, _, answer = served.send(
        "POST", "/v1/embeddings", recorded, content_type="application/json", authorization="Bearer none"
    )
    assert status == 200 and [floats(one["embedding"]) for one in json.loads(answer)["data"]] == [[3, 0, -1]] * 2


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [3]], [[]], [1, "a"]])
def test_token_ids_are_refused_with_the_way_out(served, ids):
    status, answer = served.post("embeddings", model="vector", input=ids)
    assert status == 400 and answer["error"]["param"] == "input"
    assert mentions(answer["error"]["message"], "check_embedding_ctx_length=False" if ids != [1, "a"] else "text")


@pytest.mark.parametrize("path", ["/models/vector/embed", "/models/vector"])
def test_vectors_in_tei_s_form_have_the_length_1_or_the_tenant_s(served, path):
    root = math.sqrt(5)
    assert served.post(path, inputs="ab")[1] == near([[2 / root, 0.0, -1 / root]])
    assert served.post(path, inputs=["ab", "a"], normalize=False, truncate=True, prompt_name="query")[1] == [
        [2, 0, -1],
        [1, 0, -1],
    ]
    assert served.asked.parameters["hplm_prefix"] == "query" and served.asked.parameters["truncate"] is True


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


@pytest.mark.parametrize(
    "inputs", [None, 1, [], [1], ["a", 1], ["a", "b", "c"], [[]], [["a"], ["b", "c"]], [["a"], "b"], [["a"]] * 2049]
)
def test_predict_refuses_other_forms(served, inputs):
    status, answer = served.post("/predict", {"hplm-tenant": "mood"}, inputs=inputs)
    assert status == 400 and answer.keys() == {"error", "error_type"} and answer["error_type"] == "validation"
    assert mentions(answer["error"], "inputs") and len(answer["error"]) < 1000


def sigmoid(number):
    return 1 / (1 + math.exp(-number))


@pytest.mark.parametrize(
    "given",
    [
        {"text_1": "a", "text_2": ["abc", "a"]},
        {"queries": ["a"], "documents": ["abc", "a"]},
        {"queries": ["a", "b"], "items": ["abc", "a"]},
        {"data_1": ["a", "b"], "data_2": ["abc", "a"]},
    ],
)
def test_scores_of_one_text_with_each_and_of_pairs(served, given):
    answer = ask(served, "/score", model="near", **given)
    told = [{"index": 0, "object": "score", "score": sigmoid(2)}, {"index": 1, "object": "score", "score": 0.5}]
    assert answer == near({"object": "list", "data": told, **usage(2)})
    assert len(served.asked.inputs["TEXT"]) == 2
    raw = ask(served, "/score", model="near", use_activation=False, **given)
    assert [one["score"] for one in raw["data"]] == [2, 0]


def test_scores_of_lists_that_do_not_match_are_refused(served):
    status, answer = served.post("/score", model="near", text_1=["a", "b"], text_2=["a"])
    assert status == 400 and answer["error"]["param"] == "text_1" and mentions(answer["error"]["message"], "text_2", 2, 1)


DOCUMENTS = ["ab", "abcd", "a"]


@pytest.mark.parametrize(
    ("path", "more", "tells"),
    [
        ("/rerank", {}, True),
        ("/v1/rerank", {}, True),
        ("/v2/rerank", {}, False),
        ("/v1/rerank", {"return_documents": False}, False),
        ("/v2/rerank", {"return_documents": True}, True),
        ("/v1/rerank", {"documents": [{"text": text} for text in DOCUMENTS]}, True),
    ],
)
def test_documents_are_ranked(served, path, more, tells):
    answer = ask(served, path, **{"model": "near", "query": "q", "documents": DOCUMENTS, **more})
    ranks = [(1, 3), (0, 1), (2, 0)]
    assert answer["results"] == near(
        [
            {"index": index, "relevance_score": sigmoid(number), **({"document": {"text": DOCUMENTS[index]}} if tells else {})}
            for index, number in ranks
        ]
    )
    assert served.asked.inputs == {"TEXT": ["q"] * 3, "TEXT_PAIR": DOCUMENTS} and answer["usage"] == usage(3)["usage"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_only_the_best_documents_are_told_with_top_n(served, path):
    def indexes(**more):
        answer = ask(served, path, model="near", query="q", documents=DOCUMENTS, **more)
        return [one["index"] for one in answer["results"]]

    assert indexes(top_n=2) == [1, 0] and indexes(top_n=0) == indexes(top_n=9) == [1, 0, 2]
    for top_n in (-1, "2", 1.5):
        assert served.post(path, model="near", query="q", documents=DOCUMENTS, top_n=top_n)[0] == 400


def test_ranks_in_tei_s_form(served):
    asked = {"query": "q", "texts": DOCUMENTS, "truncate": True, "truncation_direction": "Right"}
    status, ranks = served.post("/rerank", {"hplm-tenant": "near"}, **asked)
    assert status == 200 and ranks == near([{"index": index, "score": sigmoid(n)} for index, n in ((1, 3), (0, 1), (2, 0))])
    ranks = served.post("/models/near/rerank", raw_scores=True, return_text=True, **asked)[1]
    assert ranks[0] == {"index": 1, "score": 3, "text": "abcd"}


def test_text_classification_as_a_pipeline(served):
    assert served.post("/models/mood", inputs="a", parameters={}, options={"wait_for_model": True}) == (
        200,
        near([labels(*CHANCES.values())]),
    )
    answer = served.post("/models/mood", inputs=["a", "b"], parameters={"top_k": 1, "function_to_apply": "softmax"})[1]
    assert answer == near([[{"label": "good", "score": 0.67}]] * 2)
    assert served.post("/models/flags", inputs="a", parameters={"function_to_apply": "none"})[1] == [labels(1, 0, -1)]
    status, answer = served.post("/models/mood", inputs="a", parameters={"function_to_apply": "sigmoid"})
    assert status == 400 and answer.keys() == {"error"} and mentions(answer["error"], "sigmoid", "softmax")


TEXT = "Ada King met Bob \u200b"


def test_token_classification_joins_words_with_the_same_tag(served):
    entities = [
        {"entity_group": "PER-X", "score": 0.5, "word": "Ada King", "start": 0, "end": 8},
        {"entity_group": "PER-X", "score": 0.5, "word": "Bob", "start": 13, "end": 16},
    ]
    assert served.post("/models/names", inputs=TEXT) == (200, entities)
    assert served.post("/models/names", inputs=[TEXT], parameters={"aggregation_strategy": "max"}) == (200, [entities])
    everything = served.post("/models/names", inputs=TEXT, parameters={"ignore_labels": []})[1]
    assert [one["word"] for one in everything] == ["Ada King", "met", "Bob"]


def test_token_classification_of_each_word(served):
    answer = served.post("/models/names", inputs=TEXT, parameters={"aggregation_strategy": "none"})[1]
    assert [(one["entity"], one["word"]) for one in answer] == [("B-PER-X", "Ada"), ("I-PER-X", "King"), ("B-PER-X", "Bob")]


def test_question_answering(served):
    inputs = {"question": "Who?", "context": "It, Ada, did."}
    answer = {"answer": "Ada", "score": 0.75, "start": 4, "end": 7}
    assert served.post("/models/find", inputs=inputs, parameters={"handle_impossible_answer": True}) == (200, answer)
    assert served.post("/models/find", inputs=[inputs] * 2, parameters={"top_k": 1}) == (200, [answer] * 2)
    for wrong, named in ((inputs, "top_k"), ({"question": "Who?"}, "context"), ("Who?", "question"), ([], "inputs")):
        status, said = served.post("/models/find", inputs=wrong, parameters={"top_k": 2})
        assert status == 400 and mentions(said["error"], named)


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if "{" not in path])
def test_a_tenant_is_named_by_the_field_the_header_or_the_path(served, path):
    tenant = next(name for name, one in ENCODED.items() if one[0] in ENDPOINTS[path].tasks)
    body = {name: VALUES[name] for name in FIELDS[path]}
    own = {"hplm-tenant": tenant}
    for way in (
        (path, None, {"model": tenant}),
        (path, own, {}),
        (f"/models/{tenant}{path}", None, {}),
        (path, own, {"model": tenant}),
    ):
        status, answer = served.post(way[0], way[1], **way[2], **body)
        assert status == 200, answer
        assert served.asked.parameters["tenant"] == served.asked.headers["hplm-tenant"] == tenant
    for headers, more, named in ((None, {}, "hplm-tenant"), (own, {"model": "other"}, "other"), (None, {"model": 5}, "name")):
        status, answer = served.post(path, headers, **more, **body)
        assert status == 400 and mentions(json.dumps(answer), named)


RANKED = ["query", "documents"]
VALUES = {"input": "a", "inputs": "a", "query": "a", "documents": ["b"], "text_1": "a", "text_2": "b"}
FIELDS = {
    "/v1/embeddings": ["input"], "/pooling": ["input"], "/embed": ["inputs"],
    "/v1/classifications": ["input"], "/v1/moderations": ["input"], "/classify": ["input"], "/predict": ["inputs"],
    "/score": ["text_1", "text_2"], "/rerank": RANKED, "/v1/rerank": RANKED, "/v2/rerank": RANKED,
}  # fmt: skip


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


def test_a_tenant_of_another_task_is_refused_with_the_ways_to_ask_it(served):
    for path, model, ways in (
        ("/classify", "near", ["/score", "/v2/rerank"]),
        ("/v2/rerank", "mood", ["/classify", "/models/mood"]),
        ("/predict", "open", ["/v1/chat/completions"]),
        ("/v1/completions", "mood", ["/v1/classifications"]),
    ):
        status, answer = served.post(path, model=model, **({"prompt": "a"} if "completions" in path else {}))
        assert status == 400 and mentions(json.dumps(answer), model, *ways)


@pytest.mark.parametrize(("path", "model"), [("/classify", "mood"), ("/v1/classifications", "flags"), ("/rerank", "near")])
def test_unknown_fields_are_refused_by_their_name(served, path, model):
    body = {"input": "a"} if model != "near" else {"query": "a", "documents": ["b"]}
    for name, value in (("messages", []), ("dimensions", 3), ("truncation_side", "left"), ("truncate_prompt_tokens", 9)):
        status, answer = served.post(path, model=model, **body, **{name: value})
        assert status == 400 and mentions(json.dumps(answer), name), (name, answer)


def test_long_lists_are_answered_in_order_up_to_a_limit(served):
    texts = ["a" * (number % 999) for number in range(2048)]
    answer = ask(served, "/score", model="near", text_1="", text_2=texts, use_activation=False)
    assert [one["score"] for one in answer["data"]] == [*map(len, texts)]
    status, answer = served.post("/classify", model="mood", input=["a"] * 2049)
    assert status == 400 and mentions(answer["error"]["message"], "2,048")


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
    named = {"localhost:9000": served.address, "stdlib-area": "mood", "ranker": "near", "finder": "vector", "luna": "open"}
    commands = re.findall(r"^(curl .*(?:\n  .*)*)", page, re.MULTILINE)
    assert len(commands) == 5
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
