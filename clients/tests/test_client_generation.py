"""Generated text through the client: whole and streamed, over both protocols, with errors as classes."""

import asyncio
import json

import pytest

from hplm.cli.main import main
from hplm_client import AsyncHplmClient, DeadlineMissed, HplmClient, InvalidInput, NoBackbone, NoTenant, QuotaExceeded
from tests.support.servers import SECRET, cancelled
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
LONG = {"tenant": "single", "temperature": 0, "max_tokens": 16_000, "ignore_eos": True}
CHAT_MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "Où ?"}]
CHAT_WRITTEN = "<|258|>system\nbe kind<|257|>\n<|258|>user\nOù ?<|257|>\n<|258|>assistant\n"
ASKED = {"a prompt": ({"prompt": "some words"}, "some words"), "messages": ({"messages": CHAT_MESSAGES}, CHAT_WRITTEN)}


@pytest.fixture(params=["http", "grpc"])
def protocol(request):
    return request.param


@pytest.fixture
def served(servers):
    return servers.get("chat")


@pytest.fixture
def at(served, protocol):
    return served.http_url if protocol == "http" else served.grpc_url, protocol


@pytest.fixture
def client(at):
    with HplmClient(*at) as client:
        yield client


@pytest.mark.parametrize(("given", "written"), ASKED.values(), ids=ASKED)
def test_a_stream_is_the_whole_answer_in_parts_and_asyncio_gives_the_same(at, client, given, written):
    whole = client.generate(**given, tenant="plain", **GREEDY)
    assert client.generate(written, tenant="plain", **GREEDY) == whole
    assert (whole.finish_reason, whole.generated_tokens) == ("length", 24)
    assert written is CHAT_WRITTEN or whole.prompt_tokens == len(written) + 1

    async def ask():
        async with AsyncHplmClient(*at) as other:
            pieces = [piece async for piece in other.stream(**given, tenant="plain", **GREEDY)]
            return pieces, await other.generate(**given, tenant="plain", **GREEDY)

    streamed, again = asyncio.run(ask())
    assert again == whole
    for pieces in (list(client.stream(**given, tenant="plain", **GREEDY)), streamed):
        assert len(pieces) > 1 and "".join(piece.text for piece in pieces) == whole.text
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert sum(piece.tokens for piece in pieces) == 24


def test_several_choices_are_told_apart(client):
    asked = {"tenant": "plain", "n": 2, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    whole, texts = client.generate("a", **asked), ["", ""]
    for piece in client.stream("a", **asked):
        texts[piece.choice] += piece.text
    assert tuple(texts) == whole.texts and whole.generated_tokens == 16


def test_the_key_is_sent_on_every_way(at, client):
    with pytest.raises(NoTenant):
        client.generate("a", tenant="keyed", **GREEDY)
    with HplmClient(*at, api_key=SECRET) as keyed:
        whole = keyed.generate("a", tenant="keyed", **GREEDY)
        assert "".join(piece.text for piece in keyed.stream("a", tenant="keyed", **GREEDY)) == whole.text


def test_errors_have_their_classes(at, client):
    async def by_asyncio(given):
        async with AsyncHplmClient(*at) as other:
            with pytest.raises(given[1]):
                await other.generate("a", **given[0])
            with pytest.raises(given[1]):
                await anext(other.stream("a", **given[0]))

    for more, kind, named in (
        ({"temprature": 1}, InvalidInput, "temprature"),
        ({"top_p": 2}, InvalidInput, "top_p"),
        ({"top_p": float("nan")}, InvalidInput, ""),
        ({"first_token_ms": 0.000001}, DeadlineMissed, ""),
        ({"tenant": "keyed"}, NoTenant, ""),
    ):
        asked = {"tenant": "plain", **more}
        with pytest.raises(kind, match=named):
            client.generate("a", **asked)
        with pytest.raises(kind, match=named):
            list(client.stream("a", **asked))
        asyncio.run(by_asyncio((asked, kind)))
    for given in ({}, {"prompt": "a", "messages": CHAT_MESSAGES}, {"messages": [object()]}, {"messages": []}):
        with pytest.raises(InvalidInput, match="messages"):
            client.generate(**given, tenant="plain")
    with HplmClient(*at, backbone="nobody") as other:
        for ask in (other.generate, lambda *a, **b: list(other.stream(*a, **b))):
            with pytest.raises(NoBackbone, match="nobody"):
                ask("a", tenant="plain")
    assert client.generate("a", tenant="plain", **GREEDY).generated_tokens == 24
    with pytest.raises(NoTenant):  # the decoder that was found is no encoder
        client.infer("a", tenant="plain")


def test_a_closed_stream_frees_its_place(at, client, served):
    async def begin_and_leave():
        async with AsyncHplmClient(*at) as other:
            begun = other.stream("a", **LONG)
            await anext(begun)
            await begun.aclose()

    before = cancelled(served)
    pieces = client.stream("a", **LONG)
    assert next(pieces).tokens
    with HplmClient(*at, retries=0) as other, pytest.raises(QuotaExceeded):
        other.generate("a", tenant="single", max_tokens=1)
    pieces.close()
    eventually(lambda: cancelled(served) == before + 1)
    with HplmClient(*at, retries=600) as other:
        assert other.generate("a", tenant="single", max_tokens=1).generated_tokens == 1
        asyncio.run(begin_and_leave())
        assert other.generate("a", tenant="single", max_tokens=1).generated_tokens == 1
    eventually(lambda: cancelled(served) == before + 2)


def test_the_command_prints_the_answer(at, client, capsys):
    asked = ["generate", "--tenant", "plain", "--url", at[0], "--protocol", at[1], "--temperature", "0", "--max-tokens", "24"]
    sampling = ["--sampling", '{"ignore_eos": true}']
    assert main([*asked, *sampling, "some words", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["generated_tokens"] == 24 and answer["finish_reasons"] == ["length"]
    chat = client.generate(messages=CHAT_MESSAGES, tenant="plain", **GREEDY)
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
