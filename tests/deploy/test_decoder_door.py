"""A decoder behind the front door, by its own model and by OpenAI's interface: a real HAProxy, gateway and Triton."""

import json
import queue
import ssl
from functools import partial

import openai
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from hplm.generation.prompt_form import RETURNED
from hplm.generation.sampling import Sampling
from hplm_client import HplmClient, NoTenant
from tests.deploy.door import haproxy, require_haproxy
from tests.server.stock import tensor_of
from tests.support.metrics import cancelled
from tests.support.servers import SECRET
from tests.support.wait import PATIENCE, eventually
from tests.support.ways import generate, read

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

COMPLETIONS = "/v1/completions"
OPEN = ["lora", "plain", "single", "wide"]  # tenants without keys


@pytest.fixture(scope="module")
def door(servers, tmp_path_factory):
    """Probes the model `hplm`, because Triton takes no plain `infer` for a decoder."""
    require_haproxy()
    server = servers.get("chat")
    settings = {"HPLM_PROBED": "hplm", "HPLM_OPENAI": server.gateway}
    with haproxy(tmp_path_factory.mktemp("door"), server.http_url, server.grpc_url, "chat", **settings) as door:
        eventually(lambda: door.send("GET", "/v1/models").status == 200)
        yield door


def body_of(**fields):
    given = {"model": "plain", "prompt": "some words", "temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields}
    return json.dumps(given).encode()


@pytest.fixture
def client(door):
    """OpenAI's own client."""
    trusting = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=door.certificate))
    url = f"https://localhost:{door.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE, http_client=trusting) as client:
        yield client


MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "Où ?"}]
ASKED = {"completions": {"prompt": "some words"}, "chat": {"messages": MESSAGES}}
SETTINGS = {"temperature": 0, "max_tokens": 24}


@pytest.mark.parametrize(("way", "given"), ASKED.items())
def test_an_answer_to_openai_s_client_whole_and_streamed_is_what_our_client_gets(client, server, way, given):
    def ask(**more):
        completions = client.chat.completions if way == "chat" else client.completions
        return completions.create(model="lora", **given, **SETTINGS, extra_body={"ignore_eos": True}, **more)

    def text(choice, streamed=False):
        return choice.text if way == "completions" else (choice.delta if streamed else choice.message).content

    with HplmClient(server.grpc_url, "grpc", "chat") as ours:
        expected = ours.generate(**given, tenant="lora", ignore_eos=True, **SETTINGS)
    whole = ask()
    assert text(whole.choices[0]) == expected.text and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (expected.prompt_tokens, 24)
    *chunks, last = ask(stream=True, stream_options={"include_usage": True})
    assert len(chunks) > 1 and "".join(text(chunk.choices[0], True) for chunk in chunks) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert way != "chat" or chunks[0].choices[0].delta.role == "assistant"
    assert last.choices == [] and last.usage == whole.usage


def test_errors_and_models_have_the_classes_of_openai_s_client(client):
    for model, more, kind, code in (
        ("keyed", {}, openai.NotFoundError, "model_not_found"),
        ("keyed", {"extra_headers": {"Authorization": openai.Omit()}}, openai.AuthenticationError, "invalid_api_key"),
        ("plain", {"top_p": 2}, openai.BadRequestError, "invalid_input"),
        ("plain", {"extra_body": {"deadline_ms": 0.001}}, openai.InternalServerError, "deadline"),
    ):
        with pytest.raises(kind) as caught:
            client.completions.create(model=model, prompt="a", **more)
        assert caught.value.code == code
    keyed = client.with_options(api_key=SECRET)
    assert keyed.completions.create(model="keyed", prompt="a").choices
    listed = {model.id for model in client.models.list()}
    assert {*OPEN} <= listed and "keyed" not in listed
    assert client.models.retrieve("plain").owned_by == "chat"
    assert {model.id for model in keyed.models.list()} == {"keyed", *listed}


def test_an_encoder_beside_it_answers_in_other_forms(door, server):
    text = "some words"
    with HplmClient(server.grpc_url, "grpc", "toy") as direct:
        expected = {row.label: pytest.approx(row.score, abs=1e-5) for row in direct.infer(text, tenant="city", top_k=99).rows}
    answer = door.post("/predict", json.dumps({"inputs": text}).encode(), hplm_tenant="city")
    assert {one["label"]: one["score"] for one in json.loads(answer.body)} == expected
    answer = door.post("/v1/classifications", json.dumps({"model": "city", "input": text}).encode())
    assert json.loads(answer.body)["results"] == [{"city": {"scores": expected}}]
    answer = door.post("/models/plain", json.dumps({"inputs": text}).encode())
    assert answer.status == 400 and "/v1/chat/completions" in json.loads(answer.body)["error"]


def test_a_client_that_goes_frees_its_place(door, server):
    for stream in (True, False):
        before = cancelled(server)
        long = body_of(model="single", max_tokens=16_000, stream=stream)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(long)}\r\n\r\n".encode()
        with door.connect() as connection:
            connection.sendall(head + long)
            if stream:
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            eventually(lambda: server.held == 1)
            assert door.post(COMPLETIONS, body_of(model="single")).status == 429
        eventually(lambda: cancelled(server) == before + 1)  # noqa: B023
        assert door.post(COMPLETIONS, body_of(model="single")).status == 200


def test_a_decoder_s_own_model_answers_whole_and_in_parts_on_each_way(door, server, way):
    asked = {"prompt": "some\nwords", "tenant": "keyed", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    call = partial(way.call, f"localhost:{door.port}", api_key=SECRET, ca_file=door.certificate, backbone="chat")
    with HplmClient(server.grpc_url, "grpc", "chat", SECRET) as direct:
        expected = direct.generate(**asked)
    pieces = call(partial(read, **asked))
    assert len(pieces) > 1 and "".join(piece.text for piece in pieces) == expected.text
    assert call(partial(generate, **asked, deadline_ms=1000 * PATIENCE, request_id="one")) == expected
    for use in (generate, read):
        with pytest.raises(NoTenant):
            call(partial(use, tenant="nobody"))


def test_generate_takes_each_setting_as_a_parameter(door):
    """Some have no form as a parameter of JSON."""
    without = ("logit_bias", "stop_token_ids", "structured_outputs")
    settings = {name: value for name, value in vars(Sampling()).items() if name not in without}
    given = dict.fromkeys((*RETURNED, "stream", "exclude_input_in_output"), True)
    given |= {**settings, "max_tokens": 3, "ignore_eos": True, "stop": "\n\n\n", "logprobs": 1, "seed": 7, "tenant": "keyed"}
    given |= {"authorization": f"Bearer {SECRET}", "timeout": 10**6 * int(PATIENCE), "truncate": True, "hplm_priority": 1}
    for prompt in ({"text_input": 'a\n"b\\'}, {"messages": json.dumps(MESSAGES)}):
        answer = door.post("/v2/models/chat/generate", json.dumps({**given, **prompt, "stream": False}).encode())
        assert answer.status == 200 and all(own in answer.body for own in (b'"num_output_tokens":3', b'"logprobs":')), answer
        answer = door.post("/v2/models/chat/generate_stream", json.dumps({**given, **prompt}).encode())
        assert answer.status == 200 and answer.body.count(b"text_output") == 3, answer


def test_a_stock_stream_is_answered_when_it_is_closed_and_carries_one_request(door):
    def results(count):
        told = queue.SimpleQueue()
        tls = tritonclient.grpc.InferenceServerClient(
            f"localhost:{door.port}", ssl=True, root_certificates=str(door.certificate)
        )
        with tls as client:
            client.start_stream(lambda result, error: told.put(error or result))
            for _ in range(count):
                prompt = tensor_of(tritonclient.grpc, "text_input", "a", dims=1)
                client.async_stream_infer("chat", [prompt], parameters={"tenant": "plain"})
            client.stop_stream()
        return told

    assert results(1).get(timeout=PATIENCE).as_numpy("text_output").shape == (1,)
    refusal = results(2).get(timeout=PATIENCE)
    assert isinstance(refusal, InferenceServerException) and "more than one message" in str(refusal)
