"""The four ways to ask, and servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hplm_client import AsyncHplmClient, HplmClient
from hplm_client.retry import Attempts
from tests.support.threaded_server import ThreadedServer as Fake

WAYS = ("http", "grpc", "http-asyncio", "grpc-asyncio")
HTTP2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # what a gRPC client waits for before it sends its request


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

    def run(self, url: str, use: Callable[[Any], Any], **settings: Any) -> Any:
        """Returns what `use(client)` returns in a loop. A blocking client is asked by a thread for each call."""

        async def in_loop() -> Any:
            if self.is_async:
                async with AsyncHplmClient(url, self.protocol, **settings) as client:
                    return await use(client)
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))
            with HplmClient(url, self.protocol, **settings) as client:
                return await use(_InThreads(client))

        return asyncio.run(in_loop())


class _InThreads:
    def __init__(self, client: HplmClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return functools.partial(asyncio.to_thread, getattr(self._client, name))


def infer(client: Any, text: str = "a", **asked: Any) -> Any:
    return client.infer(text, **{"tenant": "acme", **asked})


def ready(client: Any) -> Any:
    return client.ready()


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


def before_each_pause(monkeypatch: Any, act: Callable[[], object]) -> None:
    """Runs `act` each time a client decides whether to retry."""
    decide = Attempts.pause_s
    monkeypatch.setattr(Attempts, "pause_s", lambda attempts, error: (act(), decide(attempts, error))[1])


def http(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def canned(answer: bytes) -> Fake:
    """Answers the first request of each connection with the given bytes, and then closes the connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(answer)
        writer.write_eof()
        await reader.read()  # if a request stays unread, closing resets the connection before the answer arrives

    return Fake(handle)


def cutting(protocol: str, requests: list[bytes]) -> Fake:
    """Reads and counts each request, and drops the connection instead of answering."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HTTP2_SETTINGS if protocol == "grpc" else b"")
        requests.append(await reader.readuntil(b"TEXT"))

    return Fake(handle)


def silent(beginning: bytes = b"", pause: float = 60.0) -> Fake:
    """Sends a beginning and then a byte after each pause, until the client has gone."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(beginning)
        gone = asyncio.ensure_future(reader.read())
        while not (await asyncio.wait({gone}, timeout=pause))[0]:
            writer.write(b"x")
            await writer.drain()

    return Fake(handle)


def reading_slowly(received: list[int]) -> Fake:
    """Reads piece by piece, much slower than a client sends."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            received.append(len(piece))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 0.005)

    return Fake(handle)


def forwarding(target: str, pair: Path | None = None, host: str = "127.0.0.1", port: int = 0) -> Fake:
    """Passes what comes on to a server in plain text."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(*target.split(":"))
        await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))

    return Fake(handle, pair, host, port)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while piece := await source.read(1 << 16):
            sink.write(piece)
            await sink.drain()
    finally:
        sink.close()
