"""Generated text through the client: whole and streamed, in each of the four ways, with errors as classes."""

import asyncio
import json
from functools import partial

import pytest
from client_fakes import generate, read

from hplm.cli.main import main
from hplm_client import AsyncHplmClient, DeadlineMissed, HplmClient, InvalidInput, NoBackbone, NoTenant, QuotaExceeded
from tests.support.servers import SECRET, cancelled
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

GREEDY = {"tenant": "plain", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
LONG = {**GREEDY, "tenant": "single", "max_tokens": 16_000}
CHAT = {"prompt": None, "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "Où ?"}]}
CHAT_WRITTEN = "<|258|>system\nbe kind<|257|>\n<|258|>user\nOù ?<|257|>\n<|258|>assistant\n"


@pytest.fixture
def served(servers):
    return servers.get("chat")


@pytest.fixture
def ask(way, served):
    """A function that runs `ask(lambda client: ..., **settings)` with a client of the running server."""
    return partial(way.call, way.url(served))


@pytest.mark.parametrize(
    ("given", "written"), [({"prompt": "some words"}, "some words"), (CHAT, CHAT_WRITTEN)], ids=["prompt", "chat"]
)
def test_a_stream_is_the_whole_answer_in_parts(ask, given, written):
    whole, pieces = (ask(partial(call, **given, **GREEDY)) for call in (generate, read))
    assert ask(partial(generate, prompt=written, **GREEDY)) == whole
    assert (whole.finish_reason, whole.generated_tokens) == ("length", 24)
    assert written is CHAT_WRITTEN or whole.prompt_tokens == len(written) + 1
    assert len(pieces) > 1 and "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert sum(piece.tokens for piece in pieces) == 24


def test_several_choices_are_told_apart(ask):
    asked = {"tenant": "plain", "n": 2, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    whole, texts = ask(partial(generate, **asked)), ["", ""]
    for piece in ask(partial(read, **asked)):
        texts[piece.choice] += piece.text
    assert tuple(texts) == whole.texts and whole.generated_tokens == 16


def test_the_key_is_sent_on_every_way(ask):
    keyed = {**GREEDY, "tenant": "keyed"}
    with pytest.raises(NoTenant):
        ask(partial(generate, **keyed))
    whole, pieces = (ask(partial(call, **keyed), api_key=SECRET) for call in (generate, read))
    assert "".join(piece.text for piece in pieces) == whole.text


def test_errors_have_their_classes(ask):
    for more, kind, named in (
        ({"temprature": 1}, InvalidInput, "temprature"),
        ({"top_p": 2}, InvalidInput, "top_p"),
        ({"top_p": float("nan")}, InvalidInput, None),
        ({"first_token_ms": 0.000001}, DeadlineMissed, None),
        ({"tenant": "keyed"}, NoTenant, None),
        *((given, InvalidInput, "messages") for given in (
            {"prompt": None}, {"messages": CHAT["messages"]}, {"prompt": None, "messages": [object()]},
            {"prompt": None, "messages": []},
        )),
    ):  # fmt: skip
        for call in (generate, read):
            with pytest.raises(kind, match=named):
                ask(partial(call, **{"tenant": "plain", **more}))
    for call in (generate, read):
        with pytest.raises(NoBackbone, match="nobody"):
            ask(call, backbone="nobody")
    with pytest.raises(NoTenant):  # the decoder that is found is no encoder
        ask(lambda client: client.infer("a", tenant="plain"))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_closed_stream_frees_its_place(served, protocol):
    at = served.http_url if protocol == "http" else served.grpc_url, protocol

    async def begin_and_leave():
        async with AsyncHplmClient(*at, retries=600) as other:
            begun = other.stream("a", **LONG)
            await anext(begun)
            await begun.aclose()
            return await other.generate("a", tenant="single", max_tokens=1)

    before = cancelled(served)
    with HplmClient(*at, retries=0) as client:
        pieces = client.stream("a", **LONG)
        assert next(pieces).tokens
        with pytest.raises(QuotaExceeded):
            client.generate("a", tenant="single", max_tokens=1)
        pieces.close()
    eventually(lambda: cancelled(served) == before + 1)
    with HplmClient(*at, retries=600) as other:
        assert other.generate("a", tenant="single", max_tokens=1).generated_tokens == 1
        assert asyncio.run(begin_and_leave()).generated_tokens == 1
    eventually(lambda: cancelled(served) == before + 2)


def test_the_command_prints_the_answer(served, capsys):
    at = served.grpc_url, "grpc"
    asked = ["generate", "--tenant", "plain", "--url", at[0], "--protocol", at[1], "--temperature", "0", "--max-tokens", "24"]
    sampling = ["--sampling", '{"ignore_eos": true}']
    assert main([*asked, *sampling, "some words", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["generated_tokens"] == 24 and answer["finish_reasons"] == ["length"]
    with HplmClient(*at) as client:
        chat = generate(client, **CHAT, **GREEDY)
    for more, text in (
        (["some words"], answer["texts"][0]),
        (["some words", "--stream"], answer["texts"][0]),
        (["--chat", "Où ?", "--system", "be kind"], chat.text),
    ):
        assert main([*asked, *sampling, *more]) == 0
        assert capsys.readouterr().out == text + "\n"
    for more, named in (
        (["a", "--sampling", "[1]"], "--sampling"),
        ([], "--chat"),
        (["a", "--chat", "b"], "--chat"),
        (["a", "--system", "b"], "--chat"),
    ):
        assert main([*asked, *more]) == 1
        assert named in capsys.readouterr().err
