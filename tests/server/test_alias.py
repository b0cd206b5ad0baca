"""The model `hplm` before two backbones gives what the tenant's backbone gives. Its errors: `tests/refusals/test_wire.py`."""

from dataclasses import replace

import numpy as np
import pytest

from builder.publish.export import export
from builder.publish.model_configs import ALIAS, ServingOptions
from hplm.errors import InvalidInput
from testing.random_store import random_store
from testing.toy import CONFIG, DOMAINS, TENANTS, WORDS
from tests.server.stock import LIBRARIES, names_in, refused

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

OUTPUTS = ["LABEL", "SCORE", "LOGITS", "SPAN", "CONFIDENCE", "LEVEL", "VERSION"]


@pytest.fixture(params=LIBRARIES)
def stock(request, server):
    return server.stock(request.param)


@pytest.mark.parametrize("outputs", [["SCORE"], ["LABEL", "VERSION"], []])
def test_only_requested_outputs_are_returned_and_all_if_none_is_named(stock, outputs):
    text = stock.tensor("TEXT", np.array([[WORDS[0].encode()]], dtype=object))
    for model in ("tasks", ALIAS):
        answer = stock.client.infer(model, [text], outputs=stock.wanted(outputs) or None, parameters={"tenant": "pair"})
        assert names_in(answer) == sorted(outputs or OUTPUTS)


def test_a_tenant_of_two_backbones_needs_the_name_of_a_backbone(stock):
    with refused("invalid_input", "'hugo'", "'tasks'", "'toy'"):
        stock.ask([WORDS[0]], "hugo", model=ALIAS)
    assert stock.ask([WORDS[0]], "hugo", model="tasks")["LABEL"].shape == (1, 1)


def test_no_backbone_may_have_the_aliass_name(tmp_path):
    store = random_store(tmp_path / "store", replace(CONFIG, name=ALIAS), TENANTS, DOMAINS)
    with pytest.raises(InvalidInput, match="'hplm'"):
        export(store, tmp_path / "repository", ServingOptions())
