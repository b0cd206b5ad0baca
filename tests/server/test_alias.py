"""The model `hplm` before two backbones gives the same answers and errors as the tenant's backbone."""

from dataclasses import replace

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ALIAS, ServingOptions
from hplm.errors import InvalidInput
from testing.random_store import random_store
from testing.toy import CONFIG, DOMAINS, TENANTS, WORDS
from tests.server.stock import LIBRARIES
from tests.support.message import mentioning

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

OUTPUTS = ["LABEL", "SCORE", "LOGITS", "SPAN", "CONFIDENCE", "LEVEL", "VERSION"]


@pytest.fixture(params=LIBRARIES)
def stock(request, server):
    return server.stock(request.param)


@pytest.mark.parametrize(
    ("backbone", "question"),
    [
        ("toy", {"tenant": "acme", "truncate": True, "hplm_priority": 3, "hplm_rung": 1, "unknown": "ü", "timeout": 10**8}),
        ("tasks", {"tenant": "pair", "pairs": [WORDS[1]]}),
        ("toy", {"tenant": "flux", "top_k": 2}),
    ],
)
def test_parameters_and_pairs_go_on_to_the_backbone(stock, backbone, question):
    """Without them `tests/answers/test_ways.py` compares all tenants."""
    direct, alias = (stock.ask([WORDS[0]], model=model, **question) for model in (backbone, ALIAS))
    assert direct.keys() == alias.keys()
    for name, values in direct.items():
        if name in ("SCORE", "LOGITS"):
            np.testing.assert_allclose(alias[name], values, atol=1e-3)
        else:
            np.testing.assert_array_equal(alias[name], values)


@pytest.mark.parametrize("outputs", [["SCORE"], ["LABEL", "VERSION"], []])
def test_only_requested_outputs_are_returned_and_all_if_none_is_named(stock, outputs):
    text = stock.tensor("TEXT", np.array([[WORDS[0].encode()]], dtype=object))
    wanted = [stock._library.InferRequestedOutput(name) for name in outputs] or None
    for model in ("tasks", ALIAS):
        answer = stock.client.infer(model, [text], outputs=wanted, parameters={"tenant": "pair"}).get_response()
        found = answer["outputs"] if isinstance(answer, dict) else answer.outputs
        names = [one["name"] if isinstance(one, dict) else one.name for one in found]
        assert sorted(names) == sorted(outputs or OUTPUTS)


@pytest.mark.parametrize(
    "question",
    [
        {"texts": [""]},
        {"texts": [WORDS[0], b"\xff\xfe"]},
        {"texts": [" ".join(WORDS[:100])]},
        {"texts": [WORDS[0]] * 2, "pairs": [WORDS[1]]},
        {"texts": [WORDS[0]], "top_k": -1},
        {"texts": [WORDS[0]], "truncate": "yes"},
        {"texts": [WORDS[0]], "hplm_rung": -1},
        {"texts": [WORDS[0]] * 1025},
        *({"texts": [WORDS[0]], "tenant": tenant} for tenant in (None, "", "nobody", "tasks", "toy/acme")),
    ],
)
def test_errors_equal_those_of_the_backbone(stock, question):
    question = {"tenant": "pair", **question}
    direct, alias = (_refusal(stock, model, **question) for model in ("tasks", ALIAS))
    assert alias == direct
    if question["tenant"] != "pair":
        assert direct[0] in ("404", "StatusCode.NOT_FOUND") and direct[1].startswith("[no_tenant]")


def test_a_deadline_may_expire_in_the_alias(stock):
    late = {"tenant": "pair", "texts": [WORDS[0]], "timeout": 1}
    (status, message), (direct, _) = (_refusal(stock, model, **late) for model in (ALIAS, "tasks"))
    assert status == direct and "[deadline]" in message


def _refusal(stock, model, **question):
    """Returns status and message, without the model's name that Triton adds."""
    with pytest.raises(InferenceServerException) as caught:
        stock.ask(**question, model=model)
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
