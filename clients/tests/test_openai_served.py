"""The gateway before a real Triton with tiny decoders, asked by OpenAI's own client."""

import asyncio

import openai
import pytest
import tritonclient.http

from hplm_client import HplmClient, NoBackbone
from hplm_client.settings import Settings
from hplm_client.transports.grpc_aio import AsyncGrpcTransport
from hplm_openai.requests import Asked
from tests.support.servers import SECRET
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

PATIENCE = 60
IGNORING_EOS = {"extra_body": {"ignore_eos": True}}
GREEDY = {"temperature": 0, "max_tokens": 24, **IGNORING_EOS}


@pytest.fixture
def url(server):
    return f"http://{server.gateway}/v1"


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def ours(server):
    with HplmClient(server.grpc_url, "grpc") as client:
        yield client


MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "Où ?"}]
ASKED = {"completions": {"prompt": "some words"}, "chat": {"messages": MESSAGES}}


@pytest.mark.parametrize(("way", "given"), ASKED.items())
def test_an_answer_whole_and_streamed_is_what_our_client_gets(client, ours, way, given):
    def ask(**more):
        return (client.chat.completions if way == "chat" else client.completions).create(
            model="lora", **given, **GREEDY, **more
        )

    def text(choice, streamed=False):
        return choice.text if way == "completions" else (choice.delta if streamed else choice.message).content

    expected, whole = ours.generate(**given, tenant="lora", temperature=0, max_tokens=24, ignore_eos=True), ask()
    assert text(whole.choices[0]) == expected.text and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (expected.prompt_tokens, 24)
    *chunks, last = ask(stream=True, stream_options={"include_usage": True})
    assert len(chunks) > 1 and "".join(text(chunk.choices[0], True) for chunk in chunks) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert way != "chat" or chunks[0].choices[0].delta.role == "assistant"
    assert last.choices == [] and last.usage == whole.usage


def test_errors_and_models_have_the_classes_of_openai_s_client(client, url):
    late = {"extra_body": {"deadline_ms": 0.001}}
    for model, more, kind, code in (
        ("keyed", {}, openai.NotFoundError, "model_not_found"),
        ("keyed", {"extra_headers": {"Authorization": openai.Omit()}}, openai.AuthenticationError, "invalid_api_key"),
        ("plain", {"top_p": 2}, openai.BadRequestError, "invalid_input"),
        ("plain", late, openai.InternalServerError, "deadline"),
    ):
        with pytest.raises(kind) as caught:
            client.completions.create(model=model, prompt="a", **more)
        assert caught.value.code == code
    keyed = openai.OpenAI(base_url=url, api_key=SECRET)
    assert [model.id for model in client.models.list()] == ["lora", "plain", "single", "wide"]
    assert [model.id for model in keyed.models.list()] == ["keyed", "lora", "plain", "single", "wide"]


def test_a_model_that_was_unloaded_is_no_backbone(server):
    """The gateway passes over such models."""

    async def both():
        transport = AsyncGrpcTransport(Settings(server.grpc_url, "grpc"))
        with pytest.raises(NoBackbone):
            await transport.metadata("hplm", PATIENCE)
        with pytest.raises(NoBackbone):
            await anext(transport.generate("hplm", Asked("plain", "a"), None, PATIENCE))
        await transport.close()

    headers = dict([server.server.admin_header])
    with tritonclient.http.InferenceServerClient(server.http_url) as control:
        control.unload_model("hplm", headers=headers)
        try:
            eventually(lambda: not control.is_model_ready("hplm"))
            asyncio.run(both())
        finally:
            control.load_model("hplm", headers=headers)
