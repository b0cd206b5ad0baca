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


@pytest.fixture
def served(servers):
    return servers.get("chat")


@pytest.fixture(params=["http", "grpc"])
def protocol(request):
    return request.param


def url(served, protocol):
    return served.http_url if protocol == "http" else served.grpc_url


@pytest.fixture
def client(served, protocol):
    with HplmClient(url(served, protocol), protocol) as client:
        yield client


def test_a_stream_is_the_whole_answer_in_parts(client):
    whole = client.generate("some words", tenant="plain", **GREEDY)
    pieces = list(client.stream("some words", tenant="plain", **GREEDY))
    assert len(pieces) > 1 and "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert (whole.finish_reason, whole.generated_tokens, sum(piece.tokens for piece in pieces)) == ("length", 24, 24)
    assert whole.prompt_tokens == len("some words") + 1


CHAT_MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "Où ?"}]
CHAT_WRITTEN = "<|258|>system\nbe kind<|257|>\n<|258|>user\nOù ?<|257|>\n<|258|>assistant\n"


def test_messages_are_answered_instead_of_a_prompt(served, protocol, client):
    whole = client.generate(CHAT_WRITTEN, tenant="plain", **GREEDY)
    assert client.generate(messages=CHAT_MESSAGES, tenant="plain", **GREEDY) == whole
    pieces = client.stream(messages=CHAT_MESSAGES, tenant="plain", **GREEDY)
    assert "".join(piece.text for piece in pieces) == whole.text

    async def ask():
        async with AsyncHplmClient(url(served, protocol), protocol) as other:
            pieces = other.stream(messages=CHAT_MESSAGES, tenant="plain", **GREEDY)
            assert "".join([piece.text async for piece in pieces]) == whole.text
            return await other.generate(messages=CHAT_MESSAGES, tenant="plain", **GREEDY)

    assert asyncio.run(ask()) == whole


def test_a_request_has_a_prompt_or_messages(client):
    for given in ({}, {"prompt": "a", "messages": CHAT_MESSAGES}, {"messages": [object()]}, {"messages": []}):
        with pytest.raises(InvalidInput, match="messages"):
            client.generate(**given, tenant="plain")


def test_the_command_answers_in_a_chat(served, protocol, client, capsys):
    asked = ["generate", "--tenant", "plain", "--url", url(served, protocol), "--protocol", protocol, "--temperature", "0"]
    asked += ["--max-tokens", "24", "--sampling", '{"ignore_eos": true}']
    assert main([*asked, "--chat", "Où ?", "--system", "be kind"]) == 0
    assert capsys.readouterr().out == client.generate(messages=CHAT_MESSAGES, tenant="plain", **GREEDY).text + "\n"
    for more in ([], ["a", "--chat", "b"], ["a", "--system", "b"]):
        assert main([*asked, *more]) == 1
        assert "--chat" in capsys.readouterr().err


def test_several_choices_are_told_apart(client):
    asked = {"tenant": "plain", "n": 2, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    whole, texts = client.generate("a", **asked), ["", ""]
    for piece in client.stream("a", **asked):
        texts[piece.choice] += piece.text
    assert tuple(texts) == whole.texts and whole.generated_tokens == 16


def test_the_key_is_sent_on_every_way(served, protocol, client):
    with pytest.raises(NoTenant):
        client.generate("a", tenant="keyed", **GREEDY)
    with HplmClient(url(served, protocol), protocol, api_key=SECRET) as keyed:
        whole = keyed.generate("a", tenant="keyed", **GREEDY)
        assert "".join(piece.text for piece in keyed.stream("a", tenant="keyed", **GREEDY)) == whole.text


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_errors_have_their_classes(client, way):
    def ask(**more):
        answer = getattr(client, way)("a", **{"tenant": "plain", **more})
        return answer if way == "generate" else list(answer)

    with pytest.raises(InvalidInput, match="temprature"):
        ask(temprature=1)
    with pytest.raises(InvalidInput, match="top_p"):
        ask(top_p=2)
    with pytest.raises(InvalidInput):
        ask(top_p=float("nan"))
    with pytest.raises(DeadlineMissed):
        ask(first_token_ms=0.000001)
    assert ask(**GREEDY)


def test_a_closed_stream_frees_its_place(client, served):
    before = cancelled(served)
    pieces = client.stream("a", tenant="single", temperature=0, max_tokens=16_000, ignore_eos=True)
    assert next(pieces).tokens
    with HplmClient(client._settings.url, client._settings.protocol, retries=0) as other, pytest.raises(QuotaExceeded):
        other.generate("a", tenant="single", max_tokens=1)
    pieces.close()
    eventually(lambda: cancelled(served) == before + 1)
    with HplmClient(client._settings.url, client._settings.protocol, retries=600) as other:
        assert other.generate("a", tenant="single", max_tokens=1).generated_tokens == 1


def test_a_decoder_is_found_and_is_no_encoder(client):
    assert client.generate("a", tenant="plain", **GREEDY).generated_tokens == 24
    with pytest.raises(NoTenant):
        client.infer("a", tenant="plain")


def test_a_backbone_that_is_not_there_is_told(served, protocol):
    with HplmClient(url(served, protocol), protocol, backbone="nobody") as client:
        for ask in (client.generate, lambda *a, **b: list(client.stream(*a, **b))):
            with pytest.raises(NoBackbone, match="nobody"):
                ask("a", tenant="plain")


def test_asyncio_gives_the_same(served, protocol, client):
    whole = client.generate("some words", tenant="plain", **GREEDY)

    async def ask():
        async with AsyncHplmClient(url(served, protocol), protocol) as other:
            texts = [piece.text async for piece in other.stream("some words", tenant="plain", **GREEDY)]
            with pytest.raises(NoTenant):
                await other.generate("a", tenant="keyed")
            with pytest.raises(InvalidInput):
                await anext(other.stream("a", tenant="plain", top_p=2))
            begun = other.stream("a", tenant="single", temperature=0, max_tokens=16_000, ignore_eos=True)
            await anext(begun)
            await begun.aclose()
            return texts, await other.generate("some words", tenant="plain", **GREEDY)

    texts, answer = asyncio.run(ask())
    assert len(texts) > 1 and "".join(texts) == whole.text and answer == whole
    with HplmClient(url(served, protocol), protocol, retries=600) as other:
        assert other.generate("a", tenant="single", max_tokens=1).generated_tokens == 1


def test_the_command_prints_the_answer(served, protocol, capsys):
    asked = ["generate", "some words", "--tenant", "plain", "--url", url(served, protocol), "--protocol", protocol]
    asked += ["--temperature", "0", "--max-tokens", "24", "--sampling", '{"ignore_eos": true}']
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["generated_tokens"] == 24 and answer["finish_reasons"] == ["length"]
    for more in ([], ["--stream"]):
        assert main([*asked, *more]) == 0
        assert capsys.readouterr().out == answer["texts"][0] + "\n"
    assert main([*asked[:-1], "[1]"]) == 1
    assert "--sampling" in capsys.readouterr().err
