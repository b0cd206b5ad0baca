"""The model `hplm` before two backbones gives the same answers and errors as the tenant's backbone."""

import json
import queue
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ALIAS, ServingOptions
from hplm.errors import InvalidInput
from testing.random_store import random_store
from testing.toy import CONFIG, DOMAINS, TENANTS, WORDS, random_text
from tests.server.stock import LIBRARIES, Stock
from tests.support.message import mentioning
from tests.support.servers import serving

pytestmark = pytest.mark.slow

OTHERS = [replace(tenant, id=f"other-{tenant.id}") for tenant in TENANTS[:3]] + [replace(TENANTS[4], id="hugo")]
BACKBONES = {"acme": "toy", "beta": "toy", "other-acme": "other", "other-beta": "other", "other-city": "other"}


@pytest.fixture(scope="module")
def server(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alias")
    export(toy.store, folder / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256))
    other = random_store(folder / "store", replace(CONFIG, name="other"), OTHERS, DOMAINS, spread=0.3)
    export(other, folder / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256))
    with serving(folder / "repository") as server:
        yield server


@pytest.fixture(params=LIBRARIES)
def stock(request, server):
    return Stock(server, request.param)


def _same(one, other):
    assert one.keys() == other.keys()
    for name, values in one.items():
        if name in ("SCORE", "LOGITS"):
            np.testing.assert_allclose(values, other[name], atol=1e-3)
        else:
            np.testing.assert_array_equal(values, other[name])


def test_the_answer_equals_that_of_the_backbone(stock):
    rng = random.Random(1)
    for tenant, backbone in BACKBONES.items():
        texts = [random_text(rng) for _ in range(3)] + ["日本"]
        for parameters in ({}, {"truncate": True, "hplm_priority": 3, "hplm_rung": 1, "unknown": "ü", "timeout": 60_000_000}):
            direct = stock.ask(texts, tenant, model=backbone, **parameters)
            _same(stock.ask(texts, tenant, model=ALIAS, **parameters), direct)
    pairs = {"texts": [WORDS[0]], "tenant": "other-acme", "pairs": [WORDS[1]]}
    _same(stock.ask(**pairs, model=ALIAS), stock.ask(**pairs, model="other"))
    best = {"texts": [WORDS[0]], "tenant": "other-city", "top_k": 4}
    _same(stock.ask(**best, model=ALIAS), stock.ask(**best, model="other"))


def test_only_requested_outputs_are_returned_and_all_if_none_is_named(stock):
    text = stock.tensor("TEXT", np.array([[WORDS[0].encode()]], dtype=object))
    for outputs in (["SCORE"], ["LABEL", "VERSION"], []):
        wanted = [stock._library.InferRequestedOutput(name) for name in outputs]
        answers = [
            stock.client.infer(model, [text], outputs=wanted or None, parameters={"tenant": "other-acme"}).get_response()
            for model in ("other", ALIAS)
        ]
        names = [
            [out["name"] for out in answer["outputs"]] if isinstance(answer, dict) else [out.name for out in answer.outputs]
            for answer in answers
        ]
        assert (
            sorted(names[0])
            == sorted(names[1])
            == sorted(outputs or ["LABEL", "SCORE", "LOGITS", "SPAN", "CONFIDENCE", "LEVEL", "VERSION"])
        )


@pytest.mark.parametrize(
    "question",
    [
        {"texts": [""]},
        {"texts": [WORDS[0], b"\xff\xfe"]},
        {"texts": [" ".join(WORDS[:100])]},
        {"texts": [WORDS[0]] * 2, "pairs": [WORDS[1]]},
        {"texts": [WORDS[0]], "top_k": -1},
        {"texts": [WORDS[0]], "truncate": "yes"},
        {"texts": [WORDS[0]], "hplm_rung": 2},
        {"texts": [WORDS[0]] * 1025},
    ],
)
def test_errors_equal_those_of_the_backbone(stock, question):
    direct, alias = (_refusal(stock, model, "other-acme", **question) for model in ("other", ALIAS))
    assert alias == direct


def test_a_deadline_may_expire_in_the_alias(stock):
    status, message = _refusal(stock, ALIAS, "other-acme", texts=[WORDS[0]], timeout=1)
    assert status == _refusal(stock, "other", "other-acme", texts=[WORDS[0]], timeout=1)[0]
    assert "[deadline]" in message


@pytest.mark.parametrize("tenant", [None, "", "nobody", "other", "toy/acme"])
def test_an_unknown_tenant_gets_the_error_of_the_backbones(stock, tenant):
    said = {_refusal(stock, model, tenant, texts=[WORDS[0]]) for model in ("toy", "other", ALIAS)}
    ((status, message),) = said
    assert status in ("404", "StatusCode.NOT_FOUND") and message.startswith("[no_tenant]")


def _refusal(stock, model, tenant, **question):
    """Returns status and message, without the model's name that Triton adds."""
    with pytest.raises(InferenceServerException) as caught:
        stock.ask(**question, tenant=tenant, model=model)
    message = caught.value.message().removeprefix(f"in ensemble '{model}', ").removeprefix("in ensemble 'other', ")
    return caught.value.status(), message.replace(f"'{model}'", "'MODEL'")


def test_a_tenant_of_two_backbones_needs_the_name_of_a_backbone(stock):
    with pytest.raises(InferenceServerException, match=mentioning("[invalid_input]", "'hugo'", "'other'", "'toy'")):
        stock.ask([WORDS[0]], "hugo", model=ALIAS)
    assert stock.ask([WORDS[0]], "hugo", model="other")["LABEL"].shape == (1, 1)


def test_many_requests_at_once_each_get_their_own_answer(stock):
    rng = random.Random(2)
    requests = [(rng.choice(list(BACKBONES)), [random_text(rng) for _ in range(rng.randint(1, 3))]) for _ in range(150)]
    with ThreadPoolExecutor(48) as pool:
        answers = list(pool.map(lambda request: stock.ask(request[1], request[0], model=ALIAS), requests))
    for (tenant, texts), answer in list(zip(requests, answers, strict=True))[::5]:
        _same(answer, stock.ask(texts, tenant, model=BACKBONES[tenant]))


def test_no_backbone_may_have_the_aliass_name(tmp_path):
    store = random_store(tmp_path / "store", replace(CONFIG, name=ALIAS), TENANTS, DOMAINS)
    with pytest.raises(InvalidInput, match="'hplm'"):
        export(store, tmp_path / "repository", ServingOptions())


def test_a_request_that_is_cancelled_while_it_waits_is_not_computed(server):
    client = LIBRARIES["grpc"].InferenceServerClient(server.grpc_url)
    stock = Stock(server, "grpc")
    texts = stock.tensor("TEXT", np.array([[" ".join(WORDS[:30]).encode()]] * 200, dtype=object))
    before, answered = _looked_up(server), queue.SimpleQueue()

    def answer(result, error):
        answered.put(error)

    calls = [client.async_infer(ALIAS, [texts], callback=answer, parameters={"tenant": "acme"}) for _ in range(160)]
    errors = [answered.get(timeout=120) for _ in range(5)]  # the alias has all of them by now, and most wait there
    for call in calls[60:]:
        call.cancel()
    assert client.is_server_live()  # over the same connection, so that the server has the cancellations by now
    taken = _looked_up(server) - before
    errors += [answered.get(timeout=120) for _ in calls[5:]]
    assert sum(error is None for error in errors) >= 60
    assert 60 <= _settled(server) - before <= max(60, taken) + 32, "those that were sent on when they were taken back"


def _looked_up(server):
    """Returns the number of look-ups, from Triton's own counter."""
    url = f"http://{server.http_url}/v2/models/toy-lookup/stats"
    with urllib.request.urlopen(url, timeout=60) as response:
        (model,) = json.load(response)["model_stats"]
    return sum(int(model["inference_stats"][end]["count"]) for end in ("success", "fail"))


def _settled(server):
    """Returns the number once it no longer grows."""
    before = -1
    while (found := _looked_up(server)) != before:
        before = found
        time.sleep(1.0)
    return found
