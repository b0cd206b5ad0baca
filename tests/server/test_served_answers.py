"""Answers of a real Triton equal the reference: every tenant, alone and mixed, fp32, bf16 and int8, HTTP and gRPC."""

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from testing.reference import Reference
from testing.toy import TENANTS, WORDS, random_text
from tests.server.stock import LIBRARIES, Stock
from tests.support.answers import Comparison
from tests.support.servers import serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["fp32", "bf16", "int8"])
def served(request, toy, tmp_path_factory):
    repository = tmp_path_factory.mktemp(f"served-{request.param}")
    export(toy.store, repository, ServingOptions(dtype=request.param, slots=4, batch_tokens=256))
    with serving(repository) as server:
        yield server, request.param


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_every_tenant_alone_and_in_mixed_batches_equals_the_reference(served, toy, protocol):
    server, dtype = served
    reference = Reference.open(toy.folder, eight_bits=dtype == "int8")
    stock, rng, comparison = Stock(server, protocol), random.Random(protocol), Comparison()
    requests = [(tenant.id, [random_text(rng)]) for tenant in TENANTS]
    requests += [(rng.choice(TENANTS).id, [random_text(rng) for _ in range(rng.randint(1, 5))]) for _ in range(80)]
    alone = [stock.ask(texts, tenant) for tenant, texts in requests[: len(TENANTS)]]
    with ThreadPoolExecutor(8) as pool:
        mixed = list(pool.map(lambda request: stock.ask(request[1], request[0]), requests[len(TENANTS) :]))
    for (tenant, texts), answer in zip(requests, alone + mixed, strict=True):
        for i, text in enumerate(texts):
            expected = reference.forward(text, tenant).numpy()
            comparison.add(tenant, answer["LOGITS"][i, : len(expected)], expected)
            assert (answer["LOGITS"][i, len(expected) :] == 0).all()
            assert (answer["LABEL"][i, len(expected) :] == b"").all() and (answer["SPAN"][i, len(expected) :] == -1).all()
    comparison.assert_equal(dtype)


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_outputs_have_their_documented_names_types_and_shapes(served, protocol):
    server, _ = served
    stock = Stock(server, protocol)
    text = f"{WORDS[0]} {WORDS[1]} 日本"
    one = stock.ask([text], "acme")
    assert one["LABEL"].shape == (1, 1) and one["LABEL"][0, 0].decode() in ("red", "grün", "blue")
    assert one["SCORE"].dtype == np.float32 and 1 / 3 <= one["SCORE"][0, 0] <= 1
    assert one["LOGITS"].shape == (1, 1, 3) and one["SPAN"].tolist() == [[[0, len(text)]]]
    assert one["VERSION"].tolist() == [[b"1"]]
    best = stock.ask([text], "city", top_k=4)
    assert best["LABEL"].shape == (1, 4) and (np.diff(best["SCORE"][0]) <= 0).all()
    tags = stock.ask([text, WORDS[2]], "beta")
    assert tags["SPAN"][0].tolist() == [[0, 2], [3, 5], [6, 8]] and tags["LABEL"][1, 1:].tolist() == [b"", b""]
    pair = stock.ask([WORDS[0]], "acme", pairs=[WORDS[1]])
    assert not np.allclose(pair["LOGITS"], stock.ask([WORDS[0]], "acme")["LOGITS"], atol=1e-3)
    assert stock.ask([text], "acme", outputs=["SCORE"]).keys() == {"SCORE"}
    assert stock.ask([text, text], "acme", outputs=["LEVEL"], hplm_rung=1)["LEVEL"].tolist() == [[1], [1]]


def test_an_answer_in_json_is_json(served):
    """RFC 8259 has no NaN and no infinity. Here two texts have fewer rows than the longest, and a word has no token."""
    server, _ = served
    texts = [f"{WORDS[0]} {WORDS[1]} {WORDS[2]}", WORDS[3], f"{WORDS[4]} \u200b"]
    inputs = [{"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}]
    body = json.dumps({"parameters": {"tenant": "beta"}, "inputs": inputs}).encode()
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/toy/infer", data=body)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.loads(response.read(), parse_constant=_no_json)
    listed = {"LABEL", "SCORE", "LOGITS", "SPAN", "CONFIDENCE", "LEVEL", "VERSION"}
    assert {output["name"] for output in answer["outputs"]} == listed


def _no_json(number):
    raise AssertionError(f"{number} is no JSON")
