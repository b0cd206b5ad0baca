"""The model `hplm` before an encoder and a decoder: prompts are answered as by the decoder, texts as by the encoder."""

import json
import queue
import time
from dataclasses import replace

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ALIAS, ServingOptions
from builder.store.store import TenantFile
from hplm_client import HplmClient
from testing.random_store import random_store
from testing.toy import CHAT, WORDS
from tests.server.generating import GREEDY, RETURN, Asked, post, text_of
from tests.server.stock import LIBRARIES, Stock
from tests.support.message import mentioning, mentions
from tests.support.metrics import Scraped
from tests.support.servers import serving
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

PATIENCE = 120
AT_ONCE = 16  # prompts that the alias forwards
WRITERS = [TenantFile(name, 1, "root", 1, "generate", [], 0) for name in ("plain", "other")]
TALK = json.dumps([{"role": "user", "content": "some words"}])


@pytest.fixture(scope="module")
def server(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alias")
    export(toy.store, folder / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256))
    store = random_store(folder / "store", CHAT, WRITERS, corpus_tokens=500, spread=0.3)
    export(store, folder / "repository", ServingOptions(dtype="fp32", seats=4, cache_tokens=16_384, admission=False))
    with serving(folder / "repository") as server:
        yield server


@pytest.fixture(params=LIBRARIES)
def stock(request, server):
    return Stock(server, request.param)


def tensors(stock, given):
    found = []
    for name, value in given.items():
        datatype, values = ("BYTES", [[value.encode()]]) if isinstance(value, str) else ("BOOL", [[value]])
        found.append(stock.tensor(name, np.array(values, dtype=object if datatype == "BYTES" else bool), datatype))
    return found


def ask(stock, given, tenant="plain", headers=None, **parameters):
    given = {"sampling_parameters": json.dumps(GREEDY), **given}
    timeout = parameters.pop("timeout", None)
    parameters = {"tenant": tenant, **parameters}
    return stock.client.infer(ALIAS, tensors(stock, given), parameters=parameters, timeout=timeout, headers=headers)


def test_the_time_for_the_first_token_counts_from_the_arrival_at_the_front_door(stock):
    arrived = {"hplm-arrived": str(time.time_ns() // 1000 - 20_000_000)}
    with pytest.raises(InferenceServerException, match=r"\[deadline\]"):
        ask(stock, {"text_input": "a"}, headers=arrived, first_token_ms=15_000)
    ask(stock, {"text_input": "a"}, headers=arrived, first_token_ms=600_000)


@pytest.mark.parametrize("given", [{"text_input": "some words"}, {"messages": TALK}])
def test_a_prompt_is_answered_whole_with_the_outputs_of_the_decoder(server, stock, given):
    for more in ({}, {"exclude_input_in_output": True, **RETURN}):
        prompt = given.get("text_input")
        others = {name: value for name, value in {**given, **more}.items() if name != "text_input"}
        (direct,) = Asked(server, prompt, "plain", **others).pieces()
        answer = ask(stock, {**given, **more})
        for name in direct:
            assert answer.as_numpy(name).tolist() == [direct[name].tolist()]
        response = answer.get_response()
        found = (
            [one["name"] for one in response["outputs"]]
            if isinstance(response, dict)
            else [one.name for one in response.outputs]
        )
        assert sorted(found) == sorted(direct)


@pytest.mark.parametrize(
    "body",
    [
        {
            "text_input": "some words",
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 3,
            "max_tokens": 9,
            "return_finish_reason": True,
        },
        {
            "text_input": "some words",
            "sampling_parameters": json.dumps(GREEDY),
            "first_token_ms": 60000.5,
            "timeout": 60_000_000,
        },
        {"messages": TALK, "temperature": 0, "n": 2, "return_num_output_tokens": True},
        {"text_input": "a", "temperature": -0.5},
        {"text_input": "a", "temperature": 0.5, "sampling_parameters": "{}"},
        {"text_input": "a", "max_tokens": 20_000},
        {"text_input": "a", "messages": TALK},
        {"messages": "[]"},
        {"text_input": "a", "tenant": "nobody"},
    ],
)
def test_generate_gives_what_the_decoder_gives(server, body):
    (status, direct), (own_status, answer) = (
        post(server, "generate", model, **{"tenant": "plain", **body}) for model in ("chat", ALIAS)
    )
    assert own_status == status
    assert {**answer, "model_name": ""} == {**direct, "model_name": ""}


def test_a_client_may_ask_the_alias(server):
    with HplmClient(server.http_url) as chat, HplmClient(server.http_url, backbone=ALIAS) as alias:
        assert alias.generate("some words", tenant="plain", **GREEDY) == chat.generate("some words", tenant="plain", **GREEDY)
        assert chat._find_decoder(30) == "chat"
        talk = {"messages": json.loads(TALK), "tenant": "plain", **GREEDY, "n": 2}
        with HplmClient(server.grpc_url, "grpc", ALIAS) as other:
            assert other.generate(**talk) == alias.generate(**talk) == chat.generate(**talk)


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
    with pytest.raises(InferenceServerException, match=mentioning("[invalid_input]", *named)):
        stock.client.infer(ALIAS, tensors(stock, given), parameters={"tenant": tenant})


def test_a_request_with_two_prompts_is_refused(stock):
    prompts = stock.tensor("text_input", np.array([[b"a"], [b"b"]], dtype=object))
    with pytest.raises(InferenceServerException, match=mentioning("[invalid_input]", "text_input", "2")):
        stock.client.infer(ALIAS, [prompts], parameters={"tenant": "plain"})


def test_only_outputs_of_the_tenants_backbone_are_returned(stock):
    for given, tenant, own, foreign in (
        ("TEXT", "acme", "LABEL", "text_output"),
        ("text_input", "plain", "text_output", "LABEL"),
    ):
        wanted = [stock._library.InferRequestedOutput(name) for name in (own, foreign)]
        asked = tensors(stock, {given: WORDS[0]})
        answer = stock.client.infer(ALIAS, asked, outputs=wanted, parameters={"tenant": tenant})
        assert answer.as_numpy(own) is not None and answer.as_numpy(foreign) is None
        with pytest.raises(InferenceServerException, match=mentioning("[invalid_input]", f"{tenant!r}", own)):
            stock.client.infer(ALIAS, asked, outputs=wanted[1:], parameters={"tenant": tenant})


def test_a_deadline_counts_from_the_alias_on(server, stock):
    with pytest.raises(InferenceServerException, match=mentioning("[deadline]")):
        ask(stock, {"text_input": "a"}, timeout=1)
    assert mentions(post(server, "generate", ALIAS, tenant="plain", text_input="a", timeout=1)[1]["error"], "[deadline]")


def test_a_flood_of_prompts_holds_up_neither_other_tenants_nor_texts(server):
    client, answered = tritonclient.grpc.InferenceServerClient(server.grpc_url), queue.SimpleQueue()
    stock, flood, order = Stock(server, "grpc"), 120, []
    long = {"text_input": "a", "sampling_parameters": json.dumps({**GREEDY, "max_tokens": 200})}

    def send(tenant, given):
        """Returns how many answers had come before."""

        def answer(result, error):
            order.append(tenant)
            answered.put(error)

        before = len(order)
        client.async_infer(ALIAS, tensors(stock, given), callback=answer, parameters={"tenant": tenant})
        return before

    for _ in range(flood):
        send("plain", long)
    assert answered.get(timeout=PATIENCE) is None
    sent = {
        "acme": send("acme", {"TEXT": WORDS[0]}),
        "other": send("other", {**long, "sampling_parameters": json.dumps(GREEDY)}),
    }
    errors = [answered.get(timeout=PATIENCE) for _ in range(flood + len(sent) - 1)]
    assert errors == [None] * len(errors)
    for tenant, before in sent.items():
        assert order.index(tenant) - before < flood / 2, tenant


def test_a_prompt_that_waits_is_refused_when_it_is_late(tmp_path):
    """The server is the test's own. Its end ends the long answers, so they may take minutes."""
    positions = 65_536
    store = random_store(tmp_path / "store", replace(CHAT, positions=positions), WRITERS, corpus_tokens=500, spread=0.3)
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32", cache_tokens=positions, admission=False))
    long = {"text_input": "a", "sampling_parameters": json.dumps({**GREEDY, "max_tokens": 65_000})}
    with serving(tmp_path / "repository") as server:
        client, stock = tritonclient.grpc.InferenceServerClient(server.grpc_url), Stock(server, "grpc")

        def send(tenant, timeout=None):
            """Returns where the answer's error comes."""
            told = queue.SimpleQueue()
            sent = {"parameters": {"tenant": tenant}, "timeout": timeout}
            client.async_infer(ALIAS, tensors(stock, long), callback=lambda result, error: told.put(error), **sent)
            return told

        first = [send("plain") for _ in range(AT_ONCE)]
        eventually(lambda: _prompts_in(server) == AT_ONCE)
        assert mentions(str(send("other", 300_000).get(timeout=PATIENCE)), "[deadline]")
        assert all(told.empty() for told in first)  # all places are still taken


def _prompts_in(server):
    """Returns how many prompts the decoder has."""
    scraped = Scraped(server)
    return scraped.of("hplm_running_sequences") + scraped.of("hplm_waiting_sequences")


def test_the_alias_is_exported_with_a_decoder_alone(tmp_path):
    store = random_store(tmp_path / "store", CHAT, WRITERS, corpus_tokens=500, spread=0.3)
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32", cache_tokens=2048))
    with serving(tmp_path / "repository") as server:
        expected = text_of(Asked(server, "some words", "plain", stream=True).pieces())
        sent = {"tenant": "plain", "text_input": "some words", "sampling_parameters": json.dumps(GREEDY)}
        assert post(server, "generate", ALIAS, **sent)[1]["text_output"] == "some words" + expected
        with HplmClient(server.http_url) as client:
            assert client.generate("some words", tenant="plain", **GREEDY).text == expected
