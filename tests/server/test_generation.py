"""A decoder behind a real Triton: streamed and whole answers, keys, bad input, cancelling, draining, a dead process, counts."""

import http.client
import json
import os
import re
import signal
from collections import Counter
from functools import partial

import pytest
from tritonclient.utils import InferenceServerException

from builder.evaluation.writing import write_here, write_served
from builder.tasks.tasks import training_task
from hplm.errors import RESEND
from hplm.metrics.names import MODEL_RESTARTS, REGISTRY_GENERATION, SERVER_RESTARTS
from hplm.server import inherited
from hplm.server.process_group import SHARED_MEMORY
from hplm_client import HplmClient
from testing.toy import WORDS
from tests.server.stock import GREEDY, PATIENCE, RETURN, Asked, ids_of, post, refused, text_of
from tests.support.device import DEVICE
from tests.support.generative import GenerativeReference
from tests.support.metrics import METRICS, OF_DECODERS, OF_ENGINES, Scraped, cancelled, settled
from tests.support.servers import SECRET, engine_of
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

LONG = {**GREEDY, "max_tokens": 16_000}
MOVES = {RESEND: "1"}


def serves(server):
    """Whether a request is answered, or else refused because an engine or the server is to come."""
    try:
        return len(Asked(server, "a", "plain").pieces()) == 1
    except InferenceServerException as error:
        assert "[draining]" in error.message()
        return False


def test_streams_of_several_tenants_equal_the_reference(server, backbone, prompts):
    asked = [
        (prompt, tenant, Asked(server, prompt, tenant, {**GREEDY, "logprobs": 0}, stream=True, **RETURN))
        for prompt in ("a", "several words", "é水👍")
        for tenant in ("plain", "lora", "wide")
    ]
    compared = 0
    for prompt, tenant, one in asked:
        pieces, given = one.pieces(), prompts.encode(prompt).tolist()
        ids, written = ids_of(pieces), GenerativeReference(backbone).generate(given, tenant, 24)
        compared += written.sure()
        assert written.agrees(ids) and len(ids) == 24
        assert text_of(pieces) == prompts.decode(ids)
        assert sum(int(piece["num_output_tokens"][0]) for piece in pieces) == 24 and len(pieces) > 1
        assert [piece["finish_reason"][0] for piece in pieces] == [b""] * (len(pieces) - 1) + [b"length"]
        assert pieces[-1]["num_input_tokens"][0] == len(given)
    assert compared > 100


def test_what_an_evaluation_writes_is_what_is_served(server, tmp_path):
    store, chat = (
        server.built.stores["chat"],
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    )
    (file := tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, ({"text": "several words", "target": "c"}, chat))))
    examples, tenant = training_task("generate").read(file), store.known_tenant("lora")
    with HplmClient(server.http_url, "http", "chat") as client:
        served = write_served(client, tenant, examples, 12)
    assert served == write_here(store, tenant, examples, 12, DEVICE) and all(len(text) > 3 for (text,) in served)


CHAT = json.dumps([{"role": "user", "content": "some words"}])
WRITTEN = "<|258|>user\nsome words<|257|>\n<|258|>assistant\n"  # as the chat template writes it


@pytest.mark.parametrize(
    ("given", "prompt", "echoed"),
    [
        ({"text_input": "some words"}, "some words", "some words"),
        ({"messages": CHAT}, WRITTEN, "user\nsome words\nassistant\n"),
    ],
)
def test_a_whole_answer_is_the_sum_of_its_stream_on_each_way(server, prompts, given, prompt, echoed):
    assert prompts.of_messages(CHAT).tolist() == prompts.encode(WRITTEN).tolist()
    text, messages = given.get("text_input"), {name: own for name, own in given.items() if name == "messages"}
    expected = text_of(Asked(server, prompt, "lora", stream=True).pieces())
    assert text_of(Asked(server, text, "lora", stream=True, **messages).pieces()) == expected
    (whole,) = Asked(server, text, "lora", exclude_input_in_output=True, **messages, **RETURN).pieces()
    assert whole["text_output"][0].decode() == expected
    assert (whole["finish_reason"][0], whole["num_output_tokens"][0]) == (b"length", 24)
    (echo,) = Asked(server, text, "lora", exclude_input_in_output=False, **messages).pieces()
    assert echo.keys() == {"text_output"} and echo["text_output"][0].decode() == echoed + expected
    (usual,) = Asked(server, text, "lora", **messages).pieces()
    assert usual["text_output"][0].decode() == ("" if messages else echoed) + expected
    body = {**given, "tenant": "lora", "exclude_input_in_output": True}
    status, answer = post(server, "generate", **body, **GREEDY, return_finish_reason=True)
    assert (status, answer["text_output"], answer["finish_reason"]) == (200, expected, "length")
    status, events = post(server, "generate_stream", **body, sampling_parameters=json.dumps(GREEDY), stream=True)
    assert status == 200 and len(events) > 1
    assert "".join(event["text_output"] for event in events) == expected


def test_a_key_may_stand_in_the_body(server):
    """In a header: `clients/tests/test_client_served.py`. What it opens: `tests/deploy/test_decoder_door.py`."""
    bearer = f"Bearer {SECRET}"
    for way in ("generate", "generate_stream"):
        assert post(server, way, text_input="a", tenant="keyed", authorization=bearer, max_tokens=4)[0] == 200
        answer = post(server, way, text_input="a", tenant="keyed", authorization=f"{bearer}x", max_tokens=4)[1]
        assert "[no_tenant]" in json.dumps(answer)


def test_a_header_alone_names_the_tenant(server):
    for given in ({"headers": {"hplm-tenant": "lora"}}, {"parameters": {"hplm-tenant": "lora"}}):
        assert text_of(Asked(server, "a", **given).pieces()) == text_of(Asked(server, "a", "lora").pieces())
    assert "[invalid_input]" in Asked(server, "a", "plain", headers={"hplm-tenant": "lora"}).error()


def test_a_decoder_lists_the_tenants_that_a_key_opens_and_one_that_is_named(server):
    def found(**more):
        parameters = {"hplm_tenants": True, **more}
        (piece,) = Asked(server, "", parameters=parameters, sampling=None).pieces()
        return json.loads(piece["text_output"][0])

    names, opened = ([one["tenant"] for one in found(**more)] for more in ({}, {"authorization": f"Bearer {SECRET}"}))
    assert "plain" in names and {*opened} - {*names} == {"keyed"}
    assert found(tenant="plain") == [{"tenant": "plain", "task": "generate", "labels": []}]
    before = settled(server, {"hplm_running_sequences": 0})
    for more in ({"hplm_tenants": True}, {}):
        assert "[no_tenant]" in Asked(server, "a", "nobody", parameters=more).error()
    counts = settled(server, {"hplm_generations_total": 1}, before)
    assert counts.of("hplm_generations_total", outcome="no_tenant") == 1, "a listing is no request for text"


def test_a_chosen_token_is_told_before_the_likeliest(server):
    sampling = {"max_tokens": 64, "seed": 1, "ignore_eos": True, "temperature": 0.1}
    alone, answer = (Asked(server, "ab", "plain", {**sampling, "logprobs": count}, **RETURN).pieces() for count in (0, 20))
    told = [list(token) for token in json.loads(answer[0]["logprobs"][0])]
    assert [token[0] for token in told] == [str(id) for id in ids_of(alone)]
    assert any(len(token) == 20 for token in told), "none of the chosen tokens is one of the likeliest"


@pytest.mark.parametrize("way", ["gRPC", "HTTP"])
def test_a_stream_whose_client_has_gone_frees_what_it_held(server, way):
    before, body = cancelled(server), {"text_input": "a", "tenant": "single", "sampling_parameters": json.dumps(LONG)}
    if way == "gRPC":
        asked = Asked(server, "a", "single", LONG, stream=True)
        asked.piece()
        leave = partial(asked.client.stop_stream, cancel_requests=True)
    else:
        connection = http.client.HTTPConnection(server.http_url, timeout=PATIENCE)
        connection.request("POST", "/v2/models/chat/generate_stream", json.dumps({**body, "stream": True}))
        assert connection.getresponse().read(1)
        leave = connection.close
    with refused("quota"):
        Asked(server, "a", "single").piece()
    leave()
    eventually(lambda: cancelled(server) == before + 1)
    assert len(Asked(server, "a", "single").pieces()) == 1


def test_a_server_that_drains_refuses_and_ends_what_it_has_and_counts_no_probe(server):
    before, control = settled(server, {"hplm_running_sequences": 0}), server.server.control()
    asked = Asked(server, "a", "plain", {**GREEDY, "max_tokens": 400}, stream=True, return_finish_reason=True)
    asked.piece()
    probes, drained = control.probes(["chat", "toy-lookup"]), inherited.server_name(server.server.id, server.server.pid)
    try:
        server.server.leave(0)  # first routers must see it
        eventually(lambda: all("[draining]" in control.probe(model, probe, PATIENCE).reason for model, probe in probes.items()))
        assert Asked(server, "a", "plain").piece() and server.stock().ask([WORDS[0]], "acme")
        inherited.start_to_drain(drained)
        with refused("draining"):
            Asked(server, "a", "plain").piece()
        for protocol, headers, code in (("http", {}, "503"), ("http", MOVES, "501"), ("grpc", MOVES, "StatusCode.UNAVAILABLE")):
            with refused("draining") as refusal:
                server.stock(protocol).ask([WORDS[0]], "acme", headers=headers)
            assert refusal.value.status() == code, "a router sends 501 on, and cannot do so with gRPC"
        for model, probe in probes.items():
            assert "[draining]" in control.probe(model, probe, PATIENCE).reason
        assert asked.pieces()[-1]["finish_reason"][0] == b"length"
        refusals = {"hplm_generations_total": 1, "hplm_lookup_requests_total": 3}
        counts = settled(server, {"hplm_generations_total": 3, "hplm_lookup_requests_total": 4}, before)
        assert {name: counts.of(name, outcome="draining") for name in refusals} == refusals
    finally:
        for sign in ("leaving", "draining"):
            (SHARED_MEMORY / f"{drained}-{sign}").unlink(missing_ok=True)
        eventually(lambda: serves(server))  # it looks for the file now and then


def test_a_killed_decoder_ends_each_of_its_answers_once_and_another_one_serves(server):
    """The model's process stays, so every answer gets an error of ours: those in a step another one than those that wait."""
    eventually(lambda: not server.held)
    killed, before = engine_of(server.server, "chat"), Scraped(server)
    asked = [Asked(server, "a", "plain", LONG, stream=True)]
    asked[0].piece()
    os.kill(killed, signal.SIGSTOP)  # so that none ends before the others are there, however long that takes
    asked += [Asked(server, "a", "plain", LONG, stream=number % 2 == 0) for number in range(1, 12)]
    eventually(lambda: server.held == 12)
    os.kill(killed, signal.SIGKILL)
    said = Counter(re.findall(r"\[(\w+)\]", one.error())[0] for one in asked)
    assert said.total() == 12 and said.keys() <= {"crashed", "draining"}

    eventually(lambda: serves(server))
    assert engine_of(server.server, "chat") not in (None, killed)
    scraped = settled(server, {"hplm_engine_restarts_total": 1}, before)
    lost = {word: scraped.of("hplm_lost_requests_total", outcome=word) for word in ("crashed", "draining")}
    assert lost["crashed"] == said["crashed"] and lost["draining"] >= said["draining"]  # none is, between two steps
    assert scraped.of("hplm_generations_total", outcome="crashed") == said["crashed"]


def test_counts_and_times_of_answers_are_published(server):
    before = settled(server, {"hplm_running_sequences": 0})
    for tenant, sampling in (("plain", GREEDY), ("plain", {**GREEDY, "n": 2}), ("lora", {**GREEDY, "max_tokens": 1})):
        Asked(server, "words", tenant, sampling, stream=True).pieces()
    with refused("no_tenant"):
        Asked(server, "a", "nobody").piece()
    counts = {"hplm_generations_total": 4, "hplm_running_sequences": 0, "hplm_cache_tokens": 0}
    counts |= {"hplm_generated_tokens_total": 3 * 24 + 1, "hplm_prompt_tokens_total": 3 * len("*words")}
    times = {"hplm_first_token_seconds": 3, "hplm_token_seconds": 3 * (24 - 1), "hplm_answer_seconds": 4}
    scraped, now = settled(server, counts | {f"{name}_count": count for name, count in times.items()}, before), Scraped(server)
    for outcome, count in (("length", 3), ("no_tenant", 1)):
        assert scraped.of("hplm_generations_total", outcome=outcome) == count
    assert now.of("hplm_cache_room_tokens") == 32_768 and now.of("hplm_cache_share") == 0
    assert all(
        scraped.of(f"{name}_bucket", le="+Inf") == count and scraped.of(f"{name}_sum") > 0 for name, count in times.items()
    )
    shown = {name for name, own in scraped.series if ("backbone", "chat") in own}
    others = {SERVER_RESTARTS.name, MODEL_RESTARTS.name, REGISTRY_GENERATION.name}
    assert shown == {metric.name for metric in METRICS if metric in OF_DECODERS | OF_ENGINES} | others
