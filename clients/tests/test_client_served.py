"""The client against a real decoder, in each of the four ways. Encoders: `tests/answers/test_ways.py`, `tests/deploy`."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest
import tritonclient.http
from client_fakes import raising
from openai_fakes import gateway

from hplm.cli.main import main
from hplm_client import HplmClient, InvalidInput, NoBackbone, NoTenant
from hplm_client.settings import ClientSettings
from hplm_client.transports.grpc import AsyncGrpcTransport
from hplm_openai.completion_request import CompletionRequest
from tests.support.servers import SECRET
from tests.support.wait import PATIENCE, eventually
from tests.support.ways import generate, infer, read

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

GREEDY = {"tenant": "plain", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
CHAT = {"prompt": None, "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "Où ?"}]}
CHAT_WRITTEN = "<|258|>system\nbe kind<|257|>\n<|258|>user\nOù ?<|257|>\n<|258|>assistant\n"


@pytest.fixture
def ask(way, server):
    """A function that runs `ask(lambda client: ..., **settings)` with a client of the running server."""
    return partial(way.call, way.url(server))


@pytest.mark.parametrize(
    ("given", "written"), [({"prompt": "some words"}, "some words"), (CHAT, CHAT_WRITTEN)], ids=["prompt", "chat"]
)
def test_a_stream_is_the_whole_answer_in_parts(ask, given, written):
    whole, pieces = (ask(partial(call, **given, **GREEDY)) for call in (generate, read))
    for backbone in ("chat", "hplm"):  # which stands for the tenant's own
        assert ask(partial(generate, prompt=written, **GREEDY), backbone=backbone) == whole
    assert (whole.finish_reason, whole.generated_tokens) == ("length", 24)
    assert written is CHAT_WRITTEN or whole.prompt_tokens == len(written) + 1
    assert len(pieces) > 1 and "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert sum(piece.tokens for piece in pieces) == 24


def test_choices_are_told_apart_the_key_is_sent_and_errors_have_their_classes_on_every_way(ask):
    asked = {"tenant": "plain", "n": 2, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    whole, texts = ask(partial(generate, **asked)), ["", ""]
    for piece in ask(partial(read, **asked)):
        texts[piece.choice] += piece.text
    assert tuple(texts) == whole.texts and whole.generated_tokens == 16
    whole, pieces = (ask(partial(call, **{**GREEDY, "tenant": "keyed"}), api_key=SECRET) for call in (generate, read))
    assert "".join(piece.text for piece in pieces) == whole.text
    for call in (generate, read):
        for more, kind, named in (
            ({"tenant": "keyed"}, NoTenant, None),
            ({"prompt": None, "messages": [object()]}, InvalidInput, "messages"),
        ):
            with pytest.raises(kind, match=named):
                ask(partial(call, **{**GREEDY, **more}))
        with pytest.raises(NoBackbone, match="nobody"):
            ask(call, backbone="nobody")


def test_logprobs_come_with_each_token(ask):
    asked = {**GREEDY, "max_tokens": 8, "logprobs": 3}
    whole, pieces = (ask(partial(call, **asked)) for call in (generate, read))
    (tokens,) = whole.logprobs
    assert [token for piece in pieces for token in piece.logprobs] == tokens and len(tokens) == 8
    for token in tokens:
        assert len(token) == 3, "the likeliest was chosen"
        first, *others = (one["logprob"] for one in token.values())
        assert 0 >= first >= max(others)
    assert len(ask(partial(generate, **asked, n=2)).logprobs) == 2
    assert ask(partial(generate, **GREEDY)).logprobs is None and ask(partial(read, **GREEDY))[0].logprobs is None


def test_a_call_for_the_other_kind_of_backbone_is_told_the_right_one(ask):
    for call, tenant, backbones, advice in (
        (infer, "plain", ("chat", "hplm"), "use generate"),
        (generate, "acme", ("toy",), "use infer"),
        (read, "acme", ("toy",), "use infer"),
    ):
        for backbone in backbones:
            with raising(InvalidInput, match=advice):
                ask(partial(call, tenant=tenant), backbone=backbone)


def test_the_command_prints_the_answer(server, capsys):
    at = server.grpc_url, "grpc"
    asked = ["generate", "--tenant", "plain", "--url", f"grpc://{at[0]}", "--temperature", "0", "--max-tokens", "24"]
    sampling = ["--sampling", '{"ignore_eos": true, "logprobs": 1}']
    assert main([*asked, *sampling, "some words", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["generated_tokens"] == 24 and answer["finish_reasons"] == ["length"]
    assert len(answer["logprobs"][0]) == 24
    with HplmClient(*at) as client:
        chat = generate(client, **CHAT, **GREEDY)
    for more, text in (
        (["some words"], answer["texts"][0]),
        (["some words", "--stream"], answer["texts"][0]),
        (["--chat", "Où ?", "--system", "be kind"], chat.text),
    ):
        assert main([*asked, *sampling, *more]) == 0
        assert capsys.readouterr().out == text + "\n"


def test_tenants_of_encoders_and_decoders_are_listed_by_key(ask):
    open_ones = ask(lambda client: client.tenants())
    kinds = {tenant.name: (tenant.task, tenant.backbone) for tenant in open_ones}
    assert kinds["acme"] == ("classify", "toy") and kinds["plain"] == ("generate", "chat") and "keyed" not in kinds
    own = ask(lambda client: client.tenants(api_key=SECRET), backbone="chat")
    assert "keyed" in {tenant.name for tenant in own} and {tenant.backbone for tenant in own} == {"chat"}
    (acme,) = ask(lambda client: client.tenants("acme"))
    assert len(acme.labels) == 3
    with raising(NoTenant):
        ask(lambda client: client.tenants("keyed"))


def test_the_gateway_knows_the_server_s_words_for_a_prompt_that_is_too_long(server):
    with gateway(server.grpc_url) as served:
        for ask, text in ((served.complete, "a " * 9000), (served.complete, "a" * 400_000), (served.chat, "a" * 400_000)):
            status, answer = ask(text, model="plain", max_tokens=4)
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer


def test_a_model_that_was_unloaded_is_no_backbone(server):
    """The gateway passes over such models."""

    async def both():
        transport = AsyncGrpcTransport(ClientSettings(server.grpc_url, "grpc"))
        with pytest.raises(NoBackbone):
            await transport.metadata("hplm", PATIENCE)
        with pytest.raises(NoBackbone):
            await anext(transport.generate("hplm", CompletionRequest("a", tenant="plain"), None, PATIENCE))
        await transport.close()

    headers = dict([server.server.admin_header])
    with tritonclient.http.InferenceServerClient(server.http_url) as control:
        control.unload_model("hplm", headers=headers)
        try:
            eventually(lambda: not control.is_model_ready("hplm"))
            asyncio.run(both())
        finally:
            control.load_model("hplm", headers=headers)
