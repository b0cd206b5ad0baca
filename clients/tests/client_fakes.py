"""The four ways to ask, a repository with a fake backbone, and servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from hplm_client import AsyncHplmClient, HplmClient
from hplm_client.retry import Attempts
from tests.support.threaded_server import ThreadedServer

WAYS = ("http", "grpc", "http-asyncio", "grpc-asyncio")
HTTP2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # what a gRPC client waits for before it sends its request
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Way:
    """One protocol, blocking or asyncio. Calls look the same; the asyncio ones run in a loop and a client of their own."""

    protocol: str
    is_async: bool = False

    def url(self, server: Any) -> str:
        return server.http_url if self.protocol == "http" else server.grpc_url

    def call(self, url: str, use: Callable[[Any], Any], **settings: Any) -> Any:
        """Returns the result of `use(client)`, awaited with asyncio."""
        if not self.is_async:
            with HplmClient(url, self.protocol, **settings) as client:
                return use(client)

        async def in_loop() -> Any:
            async with AsyncHplmClient(url, self.protocol, **settings) as client:
                return await use(client)

        return asyncio.run(in_loop())


def infer(client: Any) -> Any:
    return client.infer("a", tenant="acme")


def generate(client: Any, prompt: str | None = "a", **asked: Any) -> Any:
    return client.generate(prompt, **{"tenant": "acme", **asked})


def read(client: Any, prompt: str | None = "a", **asked: Any) -> Any:
    """Reads a whole stream."""
    pieces = client.stream(prompt, **{"tenant": "acme", **asked})
    return _drained(pieces) if hasattr(pieces, "__anext__") else list(pieces)


async def _drained(pieces: Any) -> list[Any]:
    return [piece async for piece in pieces]


@contextlib.contextmanager
def raising(kind: type[Exception], match: str | None = None) -> Iterator[Any]:
    """Expects this error, and none of a class below it."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert type(caught.value) is kind


def http(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def chunk(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Fake(ThreadedServer):
    """Gives each connection to `handle`."""

    @property
    def url(self) -> str:
        return f"{self._host}:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            await self.handle(reader, writer)
        writer.close()


class Cutter(Fake):
    """Reads and counts each request, and drops the connection instead of answering."""

    def __init__(self, protocol: str) -> None:
        super().__init__()
        self.requests = 0
        self._greeting = HTTP2_SETTINGS if protocol == "grpc" else b""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._greeting)
        await reader.readuntil(b"TEXT")
        self.requests += 1


class Canned(Fake):
    """Answers the first request of each connection with the given bytes, and then closes the connection."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self._canned = answer

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(self._canned)
        writer.write_eof()
        await reader.read()  # if a request stays unread, closing resets the connection before the answer arrives


class Silent(Fake):
    """Reads and never answers."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass


class Dripping(Fake):
    """Sends an answer byte by byte until the client has gone."""

    def __init__(self, beginning: bytes) -> None:
        super().__init__()
        self._beginning = beginning

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(self._beginning)
        gone = asyncio.ensure_future(reader.read())
        while not (await asyncio.wait({gone}, timeout=0.05))[0]:
            writer.write(b"x")
            await writer.drain()


class SlowReader(Fake):
    """Reads piece by piece, much slower than a client sends."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0
        self._never = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            self.received += len(piece)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._never.wait(), 0.005)


class Forwarder(Fake):
    """Passes what comes on to a server in plain text. With the file of a certificate and its key, it takes only TLS."""

    def __init__(self, target: str, pair: Path | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        context = None
        if pair is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(pair)
            context.set_alpn_protocols(["h2", "http/1.1"])
        super().__init__(host, context, port)
        self._target = target.split(":")

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(*self._target)
        await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while piece := await source.read(1 << 16):
            sink.write(piece)
            await sink.drain()
    finally:
        sink.close()


def before_each_pause(monkeypatch: Any, act: Callable[[], object]) -> None:
    """Runs `act` each time a client decides whether to retry."""
    decide = Attempts.pause_s

    def acting(self: Attempts, error: Any) -> float:
        act()
        return decide(self, error)

    monkeypatch.setattr(Attempts, "pause_s", acting)


@contextlib.contextmanager
def grpc_server(answer: Callable[[Any, grpc.ServicerContext], Any]) -> Iterator[str]:
    """Answers every inference over gRPC, a stream with what `answer` iterates over. Gives its address."""

    class Answering(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ModelInfer(self, request, context):
            return answer(request, context)

        def ModelStreamInfer(self, request_iterator, context):
            return answer(request_iterator, context)

    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Answering(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None)


INPUTS, OUTPUTS = {"TEXT": "STRING 1", "TEXT_PAIR": "STRING 1"}, {
    "LABEL": "STRING -1", "SCORE": "FP32 -1", "LOGITS": "FP32 -1, -1", "SPAN": "INT32 -1, 2", "CONFIDENCE": "FP32 1",
    "LEVEL": "INT32 1", "VERSION": "STRING 1",
}  # fmt: skip


def write_backbone(repository: Path, backbone: str, answering: str) -> None:
    """Writes the three models of a backbone, of which `answering` answers and the others pass on to it.

    So the client meets a real Triton, real ensembles with their own words in front of every error, and no weights.
    """
    for model in (f"{backbone}-lookup", f"{backbone}-upper", backbone):
        (repository / model / "1").mkdir(parents=True, exist_ok=True)
        config = f"max_batch_size: 1024\ninput [ {_tensors(INPUTS)} ]\noutput [ {_tensors(OUTPUTS)} ]\n"
        if model == answering:
            shutil.copy(Path(__file__).parent / "fake_backbone" / "model.py", repository / model / "1")
            config += 'backend: "python"\ninstance_group [ { kind: KIND_CPU count: 1 } ]\n'
        else:
            maps = [f'input_map {{ key: "{name}" value: "{name}" }}' for name in INPUTS]
            maps += [f'output_map {{ key: "{name}" value: "{name}" }}' for name in OUTPUTS]
            step = f'{{ model_name: "{answering}" model_version: -1 {" ".join(maps)} }}'
            config += f'platform: "ensemble"\nensemble_scheduling {{ step [ {step} ] }}\n'
        (repository / model / "config.pbtxt").write_text(config)


def _tensors(tensors: dict[str, str]) -> str:
    given = ((name, *kind.split(" ", 1), "optional: true" * (name == "TEXT_PAIR")) for name, kind in tensors.items())
    return ", ".join(f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] {more} }}' for name, kind, dims, more in given)
