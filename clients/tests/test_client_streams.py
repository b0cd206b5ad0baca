"""Generated text from servers that end too early, end without an answer, or are no decoder."""

from __future__ import annotations

import asyncio
import json
import socket

import numpy as np
import pytest
from client_stand_ins import Canned, StandIn, grpc_server
from client_ways import Way

from hplm_client import AsyncHplmClient, ConnectionLost, InvalidInput, Unavailable, UnexpectedAnswer

EVENT = b'data: {"text_output":"a","finish_reason":"","num_input_tokens":1,"num_output_tokens":1}\n\n'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
both = pytest.mark.parametrize("is_async", [False, True])


def chunk(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def http(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def generate(client):
    return client.generate("a", tenant="acme")


def read(client):
    """Reads a whole stream."""
    pieces = client.stream("a", tenant="acme")
    return drained(pieces) if hasattr(pieces, "__anext__") else list(pieces)


async def drained(pieces):
    return [piece async for piece in pieces]


@pytest.mark.parametrize(
    ("given", "kind"), [(np.str_("1"), "string_param"), (True, "bool_param"), (2, "int64_param"), (2.5, "double_param")]
)
def test_parameters_of_a_call_keep_their_kind(given, kind):
    seen = {}

    def answer(requests, _):
        seen.update(next(requests).parameters)
        return iter(())

    def ask(client, priority):
        return client.generate("a", tenant=np.str_("acme"), priority=priority)

    way = Way("grpc", is_async=True)
    with grpc_server(answer) as url:
        with pytest.raises(UnexpectedAnswer):
            way.call(url, lambda client: ask(client, given), backbone="toy")
        with pytest.raises(InvalidInput):
            way.call(url, lambda client: ask(client, []), backbone="toy")
    assert seen["hplm_priority"].WhichOneof("parameter_choice") == kind and seen["tenant"].string_param == "acme"


@both
def test_a_stream_without_an_answer_is_an_error(is_async):
    with Canned(STREAM + chunk(b"")) as server, pytest.raises(UnexpectedAnswer, match="'toy'"):
        Way("http", is_async).call(server.url, read, backbone="toy")


def test_a_call_without_an_answer_is_an_error():
    with grpc_server(lambda *_: iter(())) as url:
        for ask in (read, generate):
            with pytest.raises(UnexpectedAnswer, match="'toy'"):
                Way("grpc", is_async=True).call(url, ask, backbone="toy")


@both
@pytest.mark.parametrize("cut", [STREAM + chunk(EVENT), http("200 OK", EVENT * 2).removesuffix(EVENT)])
def test_a_stream_that_is_cut_off_is_no_whole_answer(is_async, cut):
    with Canned(cut) as server, pytest.raises(ConnectionLost):
        Way("http", is_async).call(server.url, read, backbone="toy")


@both
def test_a_whole_stream_is_an_answer(is_async):
    for whole in (STREAM + chunk(EVENT) + chunk(b""), http("200 OK", EVENT)):
        with Canned(whole) as server:
            assert [piece.text for piece in Way("http", is_async).call(server.url, read, backbone="toy")] == ["a"]


@both
@pytest.mark.parametrize(
    ("ask", "changed"),
    [(generate, {"num_output_tokens": None}), (generate, {"num_input_tokens": []}), (read, {"finish_reason": ["", "stop"]})],
)
def test_outputs_that_are_none_of_a_decoder_are_errors(ask, changed, is_async):
    outputs = {"text_output": "a", "finish_reason": "stop", "num_input_tokens": 1, "num_output_tokens": 1, **changed}
    answer = http("200 OK", b"data: " * (ask is read) + json.dumps(outputs).encode())
    with Canned(answer) as server, pytest.raises(UnexpectedAnswer):
        Way("http", is_async).call(server.url, ask, backbone="toy")


@both
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (http("502 Bad Gateway", b"<html>proxy</html>"), Unavailable),
        (http("502 Bad Gateway", b"[]"), Unavailable),
        (http("200 OK", b"<html>hello</html>"), UnexpectedAnswer),
        (http("200 OK", b"[]"), UnexpectedAnswer),
        (http("200 OK", b"[" * 10_000), UnexpectedAnswer),
        (http("200 OK", b"data: 7\n"), UnexpectedAnswer),
    ],
)
def test_answers_of_other_servers_are_errors(answer, kind, is_async):
    for ask in (generate, read):
        for backbone in ("toy", None):
            with Canned(answer) as stranger, pytest.raises(kind):
                Way("http", is_async).call(stranger.url, ask, backbone=backbone)


class Decoder(StandIn):
    """Has an encoder too, whose prompts it does not answer. Streams begin, and end when the client leaves."""

    def handle(self, client: socket.socket) -> None:
        while request := client.recv(65536):
            path = request.split()[1]
            if path.endswith(b"/generate_stream"):
                client.sendall(STREAM + chunk(EVENT))
            else:
                client.sendall(http(*self.answer(path)))

    def answer(self, path: bytes) -> tuple[str, bytes]:
        if path == b"/v2/models/stats":
            names = ("minilm", "minilm-lookup", "minilm-upper", "chat")
            return "200 OK", json.dumps({"model_stats": [{"name": name} for name in names]}).encode()
        if path == b"/v2/models/chat":
            return "200 OK", b'{"inputs": [{"name": "text_input"}]}'
        if path == b"/v2/models/chat/generate":
            return "200 OK", b'{"text_output":"a","finish_reason":"stop","num_input_tokens":1,"num_output_tokens":1}'
        return ("200 OK" if path.endswith(b"/ready") else "404 Not Found"), b""


@both
def test_the_encoder_that_was_found_is_not_asked_to_generate(is_async):
    async def awaited(client):
        assert await client.backbone() == "minilm"
        return await generate(client), await client.backbone()

    def blocking(client):
        assert client.backbone == "minilm"
        return generate(client), client.backbone

    with Decoder() as server:
        answer, backbone = Way("http", is_async).call(server.url, awaited if is_async else blocking)
    assert (answer.text, backbone) == ("a", "minilm")


def test_many_streams_over_http_run_at_once():
    async def run(url):
        async with AsyncHplmClient(url, backbone="chat") as client:
            streams = [client.stream("a", tenant="acme") for _ in range(120)]
            begun = await asyncio.gather(*map(anext, streams))
            is_ready = await client.ready()
            for stream in streams:
                await stream.aclose()
            return len(begun), is_ready

    with Decoder() as server:
        assert asyncio.run(run(server.url)) == (120, True)
