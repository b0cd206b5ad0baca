"""Requests and streams of generated text at servers that note their headers, end too early, or are no decoder."""

from __future__ import annotations

import asyncio
import json

import grpc
import numpy as np
import pytest
from client_fakes import STREAM, Canned, Fake, Way, chunk, generate, grpc_server, http, infer, read

from hplm_client import AsyncHplmClient, ConnectionLost, InvalidInput, UnexpectedAnswer

OUTPUTS = {"text_output": "a", "finish_reason": "", "num_input_tokens": 1, "num_output_tokens": 1}
EVENT = b"data: " + json.dumps(OUTPUTS).encode() + b"\n\n"
REFUSAL = "[invalid_input] as always"
LONG = "a" * 10_000_000  # more than a server takes before it reads
both = pytest.mark.parametrize("is_async", [False, True])
on_grpc = Way("grpc", is_async=True)


class Refusing(Fake):
    """Notes the headers of each request, and refuses it."""

    def __init__(self, seen):
        super().__init__()
        self._seen = seen

    async def handle(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
        self._seen.append({name.lower(): value for name, value in (line.split(": ", 1) for line in head)})
        writer.write(http("400 Bad Request", json.dumps({"error": REFUSAL}).encode()))


def refusing_grpc(seen):
    def refuse(_, context):
        seen.append(dict(context.invocation_metadata()))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, REFUSAL)

    return grpc_server(refuse)


@pytest.mark.parametrize("call", [infer, generate, read])
def test_every_request_names_its_tenant_in_a_header(way, call):
    seen = []
    with (Refusing if way.protocol == "http" else refusing_grpc)(seen) as there, pytest.raises(InvalidInput):
        way.call(there if isinstance(there, str) else there.url, call, backbone="toy", api_key="K3Y")
    assert seen[0].items() >= {"hplm-tenant": "acme", "authorization": "Bearer K3Y"}.items()


@both
def test_a_call_that_ends_before_its_prompt_is_sent_raises_the_error_of_the_server(is_async):
    with refusing_grpc([]) as url:
        for _ in range(5):
            with pytest.raises(InvalidInput):
                Way("grpc", is_async).call(url, lambda client: client.generate(LONG, tenant="acme"), backbone="toy")


@pytest.mark.parametrize(
    ("given", "kind"), [(np.str_("1"), "string_param"), (True, "bool_param"), (2, "int64_param"), (2.5, "double_param")]
)
def test_parameters_of_a_call_keep_their_kind(given, kind):
    seen = {}

    def answer(requests, _):
        seen.update(next(requests).parameters)
        return iter(())

    with grpc_server(answer) as url:
        for priority, error in ((given, UnexpectedAnswer), ([], InvalidInput)):
            with pytest.raises(error):
                on_grpc.call(
                    url,
                    lambda client, priority=priority: client.generate("a", tenant=np.str_("acme"), priority=priority),
                    backbone="toy",
                )
    assert seen["hplm_priority"].WhichOneof("parameter_choice") == kind and seen["tenant"].string_param == "acme"


def test_a_stream_or_call_without_an_answer_is_an_error():
    for is_async in (False, True):
        with Canned(STREAM + chunk(b"")) as server, pytest.raises(UnexpectedAnswer, match="'toy'"):
            Way("http", is_async).call(server.url, read, backbone="toy")
    with grpc_server(lambda *_: iter(())) as url:
        for ask in (read, generate):
            with pytest.raises(UnexpectedAnswer, match="'toy'"):
                on_grpc.call(url, ask, backbone="toy")


@both
def test_a_stream_that_is_cut_off_is_no_whole_answer(is_async):
    for cut in (STREAM + chunk(EVENT), http("200 OK", EVENT * 2).removesuffix(EVENT)):
        with Canned(cut) as server, pytest.raises(ConnectionLost):
            Way("http", is_async).call(server.url, read, backbone="toy")
    for whole in (STREAM + chunk(EVENT) + chunk(b""), http("200 OK", EVENT)):
        with Canned(whole) as server:
            assert [piece.text for piece in Way("http", is_async).call(server.url, read, backbone="toy")] == ["a"]


@both
@pytest.mark.parametrize(
    ("ask", "changed"),
    [(generate, {"num_output_tokens": None}), (generate, {"num_input_tokens": []}), (read, {"finish_reason": ["", "stop"]})],
)
def test_outputs_that_are_none_of_a_decoder_are_errors(ask, changed, is_async):
    answer = http("200 OK", b"data: " * (ask is read) + json.dumps({**OUTPUTS, **changed}).encode())
    with Canned(answer) as server, pytest.raises(UnexpectedAnswer):
        Way("http", is_async).call(server.url, ask, backbone="toy")


class Decoder(Fake):
    """Has an encoder too, whose prompts it does not answer. Streams begin, and end when the client leaves."""

    async def handle(self, reader, writer):
        while request := await reader.read(65536):
            path = request.split()[1]
            writer.write(STREAM + chunk(EVENT) if path.endswith(b"/generate_stream") else http(*self.answer_to(path)))

    def answer_to(self, path: bytes) -> tuple[str, bytes]:
        if path == b"/v2/models/stats":
            names = ("minilm", "minilm-lookup", "minilm-upper", "chat")
            return "200 OK", json.dumps({"model_stats": [{"name": name} for name in names]}).encode()
        if path == b"/v2/models/chat":
            return "200 OK", b'{"inputs": [{"name": "text_input"}]}'
        if path == b"/v2/models/chat/generate":
            return "200 OK", json.dumps({**OUTPUTS, "finish_reason": "stop"}).encode()
        return ("200 OK" if path.endswith(b"/ready") else "404 Not Found"), b""


@both
def test_the_encoder_that_was_found_is_not_asked_to_generate(is_async):
    async def awaited(client):
        return await client.backbone(), await generate(client), await client.backbone()

    with Decoder() as server:
        used = awaited if is_async else lambda client: (client.backbone, generate(client), client.backbone)
        before, answer, after = Way("http", is_async).call(server.url, used)
    assert (before, answer.text, after) == ("minilm", "a", "minilm")


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
