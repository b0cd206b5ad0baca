"""OpenAI's interface behind the front door: a real HAProxy, the gateway, and a decoder behind a real Triton."""

import json
import ssl
from functools import partial

import openai
import pytest

from hplm_client import ConnectionLost, Forbidden, HplmClient, NoTenant
from tests.deploy.door import haproxy, require_haproxy
from tests.support.message import mentions
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


def test_hplm_client_gets_whole_answers_of_the_model_hplm(door, server, way):
    asked = {"tenant": "keyed", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    call = partial(way.call, f"localhost:{door.port}", api_key=SECRET, ca_file=door.certificate)
    whole = partial(generate, **asked)
    with HplmClient(server.grpc_url, "grpc", "chat", SECRET) as direct:
        assert call(whole, backbone="hplm") == whole(direct)
    with pytest.raises(NoTenant):
        call(partial(generate, tenant="nobody"), backbone="hplm")

    def is_refused(backbone, use, named):
        """Whether a client was told what to do. An answer of gRPC may be lost, since HAProxy resets what is still open."""
        with pytest.raises((Forbidden, ConnectionLost) if way.protocol == "grpc" else Forbidden) as refusal:
            call(use, backbone=backbone)
        return isinstance(refusal.value, Forbidden) and mentions(refusal.value, named)

    eventually(lambda: is_refused("hplm", partial(read, **asked), "OpenAI"))
    eventually(lambda: is_refused("chat", whole, "--backbone hplm"))
