"""Servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hplm_client.retry import Attempts
from tests.support.threaded_server import ThreadedServer as Fake

HTTP2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # what a gRPC client waits for before it sends its request


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
