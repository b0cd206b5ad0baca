"""The model `hplm` before an encoder and a decoder: what it refuses.

Which answers to texts are right: `tests/answers`. With which words it refuses: `tests/refusals/test_wire.py`.
"""

import json
from dataclasses import replace

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ALIAS, ServingOptions
from hplm.errors import InvalidInput
from testing.random_store import random_store
from testing.toy import CONFIG, DOMAINS, TENANTS, WORDS
from tests.server.stock import LIBRARIES, RETURN, refused

slow = pytest.mark.slow
chat = pytest.mark.server("chat")
TALK = json.dumps([{"role": "user", "content": "some words"}])
ALL = {"text_input": "a", "sampling_parameters": "{}", "stream": True, "exclude_input_in_output": True, **RETURN}


@pytest.fixture(params=LIBRARIES)
def stock(request, server):
    return server.stock(request.param)


@slow
@chat
@pytest.mark.parametrize(
    ("given", "tenant", "word", "named"),
    [
        *[(given, "plain", "invalid_input", ["'plain'", "'chat'", "text_input"]) for given in ({"messages": TALK}, ALL)],
        ({"TEXT": WORDS[0]}, "plain", "invalid_input", ["'plain'", "'chat'", "text_input"]),
        ({"text_input": "a"}, "acme", "invalid_input", ["text_input", "'acme'", "TEXT", "'toy'"]),
        ({"TEXT_PAIR": "a"}, "acme", "invalid_input", ["TEXT"]),
        ({"text_input": "a"}, "nobody", "no_tenant", []),
    ],
)
def test_a_prompt_is_refused_with_the_name_of_its_tenants_decoder(stock, given, tenant, word, named):
    tensors = [stock.tensor(name, value) for name, value in given.items()]
    with refused(word, *named):
        stock.client.infer(ALIAS, tensors, parameters={"tenant": tenant})


def test_no_backbone_may_have_the_aliass_name(tmp_path):
    store = random_store(tmp_path / "store", replace(CONFIG, name=ALIAS), TENANTS, DOMAINS)
    with pytest.raises(InvalidInput, match="'hplm'"):
        export(store, tmp_path / "repository", ServingOptions())
