"""The model `hplm` before an encoder and a decoder: prompts are answered as by the decoder, texts as by the encoder.

Which answers are right: `tests/answers`. With which words it refuses: `tests/refusals/test_wire.py`.
"""

import json
import queue
import time
from dataclasses import replace

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ALIAS, ServingOptions
from hplm.errors import InvalidInput
from testing.random_store import random_store
from testing.toy import CONFIG, DOMAINS, TENANTS, WORDS
from tests.server.stock import GREEDY, LIBRARIES, RETURN, Asked, names_in, post, refused
from tests.support.metrics import Scraped
from tests.support.wait import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

AT_ONCE = 16  # prompts that the alias forwards
TALK = json.dumps([{"role": "user", "content": "some words"}])
SETTINGS = json.dumps(GREEDY)


@pytest.fixture(params=LIBRARIES)
def stock(request, server):
    return server.stock(request.param)


def tensors(stock, given):
    return [stock.tensor(name, value) for name, value in given.items()]


def infer(stock, given, tenant="plain", model=ALIAS, parameters=None, **more):
    return stock.client.infer(model, tensors(stock, given), parameters={"tenant": tenant, **(parameters or {})}, **more)


def ask(stock, given, tenant="plain", headers=None, timeout=None, **parameters):
    given = {"sampling_parameters": SETTINGS, **given}
    return infer(stock, given, tenant, parameters=parameters, timeout=timeout, headers=headers)


def test_times_count_from_the_arrival_at_the_front_door(stock):
    arrived = {"hplm-arrived": str(time.time_ns() // 1000 - 20_000_000)}
    for late in ({"headers": arrived, "timeout": 15_000_000}, {"timeout": 1}):
        with refused("deadline"):
            ask(stock, {"text_input": "a"}, **late)
    ask(stock, {"text_input": "a"}, headers=arrived, timeout=600_000_000)


@pytest.mark.parametrize("given", [{"text_input": "some words"}, {"messages": TALK}])
def test_a_prompt_is_answered_whole_with_the_outputs_of_the_decoder(server, stock, given):
    for more in ({}, {"exclude_input_in_output": True, **RETURN}):
        others = {name: value for name, value in {**given, **more}.items() if name != "text_input"}
        (direct,) = Asked(server, given.get("text_input"), "plain", **others).pieces()
        answer = ask(stock, {**given, **more})
        assert all(answer.as_numpy(name).tolist() == [own.tolist()] for name, own in direct.items())
        assert names_in(answer) == sorted(direct)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"text_input": "a", "temperature": 0.7, "top_p": 0.9, "seed": 3, "max_tokens": 9, "return_finish_reason": True}),
        (200, {"text_input": "some words", "sampling_parameters": SETTINGS, "timeout": 60_000_000}),
        (400, {"text_input": "a", "temperature": -0.5}),
        (400, {"text_input": "a", "n": 3, "sampling_parameters": '{"n": 2}'}),
        (400, {"text_input": "a", "tenant": "nobody"}),
    ],
)
def test_generate_gives_what_the_decoder_gives(server, status, body):
    direct, answer = (post(server, "generate", model, **{"tenant": "plain", **body}) for model in ("chat", ALIAS))
    assert direct[0] == answer[0] == status
    assert {**answer[1], "model_name": ""} == {**direct[1], "model_name": ""}


@pytest.mark.parametrize(
    ("given", "tenant", "named"),
    [
        ({"text_input": "a", "stream": True}, "plain", ["stream", "'chat'"]),
        ({"TEXT": "a"}, "plain", ["TEXT", "'plain'", "text_input", "'chat'"]),
        ({"text_input": "a"}, "acme", ["text_input", "'acme'", "TEXT", "'toy'"]),
        ({"TEXT_PAIR": "a"}, "acme", ["TEXT"]),
    ],
)
def test_inputs_of_another_kind_of_backbone_are_refused(stock, given, tenant, named):
    with refused("invalid_input", *named):
        infer(stock, given, tenant)
    two = stock.tensor("text_input", "a", "b")
    with refused("invalid_input", "text_input", "2"):
        stock.client.infer(ALIAS, [two], parameters={"tenant": "plain"})


@pytest.mark.parametrize(
    ("given", "tenant", "own", "foreign", "backbone"),
    [("TEXT", "acme", "LABEL", "text_output", "toy"), ("text_input", "plain", "text_output", "LABEL", "chat")],
)
def test_only_outputs_of_the_tenants_backbone_are_returned(stock, given, tenant, own, foreign, backbone):
    wanted, asked = stock.wanted((own, foreign)), {given: WORDS[0]}
    assert names_in(infer(stock, asked, tenant, outputs=wanted)) == [own]
    usual = names_in(infer(stock, asked, tenant))
    if backbone == "toy":  # a decoder answers through a stream
        assert usual == names_in(infer(stock, asked, tenant, backbone))
    assert own in usual and foreign not in usual
    with refused("invalid_input", f"{tenant!r}", own):
        infer(stock, asked, tenant, outputs=wanted[1:])


def test_an_output_that_is_named_needs_no_flag(server, stock):
    for name in ("finish_reason", "num_input_tokens", "num_output_tokens", "logprobs"):
        answer = infer(stock, {"text_input": "a"}, outputs=stock.wanted([name]))
        assert names_in(answer) == [name]
    (token,) = json.loads(answer.as_numpy("logprobs")[0, 0])[0].values()
    assert token["logprob"] < 0
    with refused("invalid_input", "text_output"):
        infer(stock, {"text_input": "a"}, outputs=stock.wanted(["finish_reason"]), parameters={"hplm_tenants": True})


def test_no_backbone_may_have_the_aliass_name(tmp_path):
    store = random_store(tmp_path / "store", replace(CONFIG, name=ALIAS), TENANTS, DOMAINS)
    with pytest.raises(InvalidInput, match="'hplm'"):
        export(store, tmp_path / "repository", ServingOptions())


def test_a_flood_of_prompts_holds_up_no_text_and_once_cancelled_no_other_tenant(server):
    """The flood would take minutes. In which order tenants are forwarded: `test_alias_lanes.py`."""
    stock, told = server.stock("grpc"), queue.SimpleQueue()
    long = tensors(stock, {"text_input": "a", "sampling_parameters": json.dumps({**GREEDY, "max_tokens": 16_000})})
    sent = {"parameters": {"tenant": "plain"}, "callback": lambda result, error: told.put(error)}
    calls = [stock.client.async_infer(ALIAS, long, **sent) for _ in range(40)]
    eventually(lambda: _prompts_in(server) == AT_ONCE)
    assert stock.ask([WORDS[0]], "acme", model=ALIAS)["LABEL"].shape == (1, 1)
    assert told.qsize() < len(calls) - AT_ONCE, "it came behind the flood"
    for call in calls:
        call.cancel()
    assert ask(stock, {"text_input": "a"}, "wide").as_numpy("text_output") is not None
    errors = [told.get(timeout=PATIENCE) for _ in calls]
    assert sum(error is None for error in errors) < AT_ONCE, "they were answered"
    eventually(lambda: not _prompts_in(server))


def _prompts_in(server):
    """Returns how many prompts the decoder has."""
    scraped = Scraped(server)
    return scraped.of("hplm_running_sequences") + scraped.of("hplm_waiting_sequences")
