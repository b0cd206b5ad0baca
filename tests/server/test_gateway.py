"""Stock clients, the gateway and a real Triton: what a client reads is what our own client gets from the server."""

import json
import random
import subprocess

import cohere
import huggingface_hub
import mistralai.client
import openai
import pytest

from hplm_client import HplmClient
from hplm_openai.labels import ALL
from testing.toy import random_text
from tests.support.needed import needs_program
from tests.support.wait import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

TEXTS = [random_text(random.Random(seed), 20) for seed in range(3)]
OTHERS = [random_text(random.Random(seed), 20) for seed in range(3, 6)]


@pytest.fixture
def direct(server):
    """Asks the server itself."""
    with HplmClient(server.grpc_url, "grpc", "tasks") as client:
        yield client


def near(scores):
    return pytest.approx(scores, abs=1e-5)


def scores(answer):
    return near({row.label: row.score for row in answer.rows})


def test_mistral_s_client_classifies(server, direct):
    expected = direct.infer_batch(TEXTS, tenant="hugo", top_k=ALL)
    with mistralai.client.Mistral(server_url=f"http://{server.gateway}", api_key="none") as client:
        answer = client.classifiers.classify(model="hugo", inputs=TEXTS)
        assert answer.model == "hugo" and [one["hugo"].scores for one in answer.results] == list(map(scores, expected))
        with pytest.raises(mistralai.client.errors.SDKError) as refused:
            client.classifiers.classify(model="nobody", inputs="a")
    assert refused.value.status_code == 404 and "no such model" in refused.value.body


def test_hugging_face_s_client_classifies_tags_and_finds_answers(server, direct):
    def client(tenant):
        return huggingface_hub.InferenceClient(f"http://{server.gateway}/models/{tenant}", timeout=PATIENCE)

    (text, passage), (expected,) = (TEXTS[0], OTHERS[0]), direct.infer_batch(TEXTS[:1], tenant="hugo", top_k=ALL)
    assert {one.label: one.score for one in client("hugo").text_classification(text)} == scores(expected)
    expected = direct.infer(text, tenant="word")
    found = client("word").token_classification(text, aggregation_strategy="none")
    rows = [row for row in expected.rows if row.label not in ("", "O")]
    assert rows and [(one.entity, one.start, one.end, one.word) for one in found] == [
        (row.label, *row.span, text[slice(*row.span)]) for row in rows
    ]
    joined = client("word").token_classification(text)
    assert 0 < len(joined) <= len(found) and {one.entity_group for one in joined} == {"X"}
    (expected,) = direct.infer_batch([text], tenant="many", top_k=ALL)
    assert {one.label: one.score for one in client("many").text_classification(text)} == scores(expected)
    (vector,) = client("near").feature_extraction(text).tolist()
    assert vector == near(direct.infer(text, tenant="near", embedding=True).embedding)
    (expected,) = direct.infer_batch([text], pairs=[passage], tenant="find")
    answer = client("find").question_answering(text, passage)
    assert (answer.answer, (answer.start, answer.end)) == (expected.label, expected.rows[0].span)
    assert answer.score == near(expected.score) and passage[answer.start : answer.end] == answer.answer
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="question"):
        client("find").text_classification(text)


def test_cohere_s_client_ranks(server, direct):
    numbers = [float(one.label) for one in direct.infer_batch([TEXTS[0]] * 3, pairs=OTHERS, tenant="mark")]
    best = sorted(range(3), key=lambda number: -numbers[number])
    for kind in (cohere.ClientV2, cohere.Client):
        client = kind(api_key="none", base_url=f"http://{server.gateway}", timeout=PATIENCE)
        answer = client.rerank(model="mark", query=TEXTS[0], documents=OTHERS)
        assert [one.index for one in answer.results] == best
        assert [one.relevance_score for one in answer.results] == sorted(
            (one.relevance_score for one in answer.results), reverse=True
        )
        assert len(client.rerank(model="mark", query=TEXTS[0], documents=OTHERS, top_n=1).results) == 1
        with pytest.raises(cohere.NotFoundError) as refused:
            client.rerank(model="nobody", query="a", documents=["b"])
        assert "no such model" in refused.value.body["message"]


def test_openai_s_client_reads_moderations(server, direct):
    expected = direct.infer_batch(TEXTS, tenant="hugo", top_k=ALL)
    with openai.OpenAI(base_url=f"http://{server.gateway}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        answer = client.moderations.create(model="hugo", input=TEXTS)
        for result, own in zip(answer.results, expected, strict=True):
            assert result.category_scores.to_dict() == scores(own)
            assert result.flagged == (own.score >= 0.5) and any(result.categories.to_dict().values()) == result.flagged
        with pytest.raises(openai.BadRequestError, match="/v1/classifications"):
            client.completions.create(model="hugo", prompt="a")


@pytest.mark.parametrize("given", [{}, {"encoding_format": "float"}])
def test_openai_s_client_reads_vectors(server, direct, given):
    asked = {"embedding": True, "tokens": True}
    with openai.OpenAI(base_url=f"http://{server.gateway}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        answer = client.embeddings.create(model="near", input=TEXTS, **given)
        expected = direct.infer_batch(TEXTS, tenant="near", **asked)
        assert [near(one.embedding) for one in expected] == [one.embedding for one in answer.data]
        assert answer.usage.prompt_tokens == sum(one.tokens for one in expected)
        (short,) = client.embeddings.create(model="short", input=TEXTS[0], dimensions=8, **given).data
        assert short.embedding == near(direct.infer(TEXTS[0], tenant="short", **asked, parameters={"dimensions": 8}).embedding)
        model, (prefix, *_) = client.models.retrieve("near"), direct.tenants("near")[0].prefixes
        assert model.task == "embed" and model.dimensions == len(answer.data[0].embedding) and model.prefixes[0] == prefix
        (own,) = client.embeddings.create(model="near", input=TEXTS[0], extra_body={"prompt_name": prefix}, **given).data
        assert own.embedding == near(
            direct.infer(TEXTS[0], tenant="near", **asked, parameters={"hplm_prefix": prefix}).embedding
        )
        for wrong, named in (({"dimensions": 8}, "dimensions"), ({"extra_body": {"prompt_name": "nothing"}}, "prefix")):
            with pytest.raises(openai.BadRequestError, match=named):
                client.embeddings.create(model="near", input="a", **wrong)


def curl(server, path, body, *options):
    command = ["curl", "-sS", "--max-time", str(PATIENCE), f"http://{server.gateway}{path}", *options, "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_program("curl")
def test_requests_of_tei_and_vllm(server, direct):
    tei = ("-H", "content-type: application/json", "-H", "hplm-tenant: hugo")
    expected = [
        [{"label": row.label, "score": near(row.score)} for row in one.rows]
        for one in direct.infer_batch(TEXTS, tenant="hugo", top_k=ALL)
    ]
    assert curl(server, "/predict", {"inputs": [[text] for text in TEXTS]}, *tei) == expected
    assert curl(server, "/models/hugo/predict", {"inputs": TEXTS[0]}) == expected[0]
    (vector,) = curl(server, "/embed", {"inputs": TEXTS[0]}, *tei[:2], "-H", "hplm-tenant: near")
    assert vector == near(direct.infer(TEXTS[0], tenant="near", embedding=True).embedding)
    (pooled,) = curl(server, "/pooling", {"model": "near", "input": TEXTS[0]})["data"]
    assert pooled["data"] == near(vector)
    pairs = direct.infer_batch([TEXTS[0]] * 3, pairs=OTHERS, tenant="mark")
    ranks = curl(server, "/models/mark/rerank", {"query": TEXTS[0], "texts": OTHERS, "raw_scores": True})
    assert {one["index"]: one["score"] for one in ranks} == near({n: float(one.label) for n, one in enumerate(pairs)})
    answer = curl(server, "/score", {"model": "mark", "text_1": TEXTS[0], "text_2": OTHERS, "use_activation": False})
    assert [one["score"] for one in answer["data"]] == near([float(one.label) for one in pairs])
    own = direct.infer_batch(TEXTS, tenant="hugo", logits=True)
    for found, one in zip(curl(server, "/classify", {"model": "hugo", "input": TEXTS})["data"], own, strict=True):
        assert found["label"] == one.label and max(found["probs"]) == near(one.score)
        assert found["probs"].index(max(found["probs"])) == one.rows[0].logits.index(max(one.rows[0].logits))
