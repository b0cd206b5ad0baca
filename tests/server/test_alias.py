"""The model `hplm` before two backbones gives the same answers and errors as the tenant's backbone."""

import json
import queue
import random
import time
import urllib.request
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

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

KEPT = 10  # requests that are not cancelled
BACKBONES = {"acme": "toy", "beta": "toy", "pair": "tasks", "word": "tasks", "many": "tasks"}


@pytest.fixture(params=LIBRARIES)
def stock(request, server):
    return server.stock(request.param)


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
    pairs = {"texts": [WORDS[0]], "tenant": "pair", "pairs": [WORDS[1]]}
    _same(stock.ask(**pairs, model=ALIAS), stock.ask(**pairs, model="tasks"))
    best = {"texts": [WORDS[0]], "tenant": "flux", "top_k": 2}
    _same(stock.ask(**best, model=ALIAS), stock.ask(**best))


def test_only_requested_outputs_are_returned_and_all_if_none_is_named(stock):
    text = stock.tensor("TEXT", np.array([[WORDS[0].encode()]], dtype=object))
    for outputs in (["SCORE"], ["LABEL", "VERSION"], []):
        wanted = [stock._library.InferRequestedOutput(name) for name in outputs]
        answers = [
            stock.client.infer(model, [text], outputs=wanted or None, parameters={"tenant": "pair"}).get_response()
            for model in ("tasks", ALIAS)
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
    direct, alias = (_refusal(stock, model, "pair", **question) for model in ("tasks", ALIAS))
    assert alias == direct


def test_a_deadline_may_expire_in_the_alias(stock):
    status, message = _refusal(stock, ALIAS, "pair", texts=[WORDS[0]], timeout=1)
    assert status == _refusal(stock, "tasks", "pair", texts=[WORDS[0]], timeout=1)[0]
    assert "[deadline]" in message


@pytest.mark.parametrize("tenant", [None, "", "nobody", "tasks", "toy/acme"])
def test_an_unknown_tenant_gets_the_error_of_the_backbones(stock, tenant):
    said = {_refusal(stock, model, tenant, texts=[WORDS[0]]) for model in ("toy", "tasks", ALIAS)}
    ((status, message),) = said
    assert status in ("404", "StatusCode.NOT_FOUND") and message.startswith("[no_tenant]")


def _refusal(stock, model, tenant, **question):
    """Returns status and message, without the model's name that Triton adds."""
    with pytest.raises(InferenceServerException) as caught:
        stock.ask(**question, tenant=tenant, model=model)
    message = caught.value.message().removeprefix(f"in ensemble '{model}', ").removeprefix("in ensemble 'tasks', ")
    return caught.value.status(), message.replace(f"'{model}'", "'MODEL'")


def test_a_tenant_of_two_backbones_needs_the_name_of_a_backbone(stock):
    with pytest.raises(InferenceServerException, match=mentioning("[invalid_input]", "'hugo'", "'tasks'", "'toy'")):
        stock.ask([WORDS[0]], "hugo", model=ALIAS)
    assert stock.ask([WORDS[0]], "hugo", model="tasks")["LABEL"].shape == (1, 1)


def test_no_backbone_may_have_the_aliass_name(tmp_path):
    store = random_store(tmp_path / "store", replace(CONFIG, name=ALIAS), TENANTS, DOMAINS)
    with pytest.raises(InvalidInput, match="'hplm'"):
        export(store, tmp_path / "repository", ServingOptions())


def test_a_request_that_is_cancelled_while_it_waits_is_not_computed(server):
    client = LIBRARIES["grpc"].InferenceServerClient(server.grpc_url)
    stock = Stock(server, "grpc")
    texts = stock.tensor("TEXT", np.array([[" ".join(WORDS[:30]).encode()]] * 40, dtype=object))
    before, answered = _looked_up(server), queue.SimpleQueue()

    def answer(result, error):
        answered.put(error)

    calls = [client.async_infer(ALIAS, [texts], callback=answer, parameters={"tenant": "acme"}) for _ in range(KEPT + 100)]
    errors = [answered.get(timeout=120) for _ in range(5)]  # the alias has all of them by now, and most wait there
    for call in calls[KEPT:]:
        call.cancel()
    assert client.is_server_live()  # over the same connection, so that the server has the cancellations by now
    taken = _looked_up(server) - before
    errors += [answered.get(timeout=120) for _ in calls[5:]]
    assert sum(error is None for error in errors) >= KEPT
    assert KEPT <= _settled(server) - before <= max(KEPT, taken) + 32, "those that were sent on when they were taken back"


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
