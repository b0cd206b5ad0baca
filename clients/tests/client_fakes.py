"""Servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from hplm_client.retry import Attempts
from tests.support.fakes import Listener

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


def fake(handle: Callable[..., Awaitable[object]]) -> Callable[..., Listener]:
    """Turns what answers a connection into a server. It is called with what comes behind the streams, and how to listen."""
    return lambda *given, **listening: Listener(lambda *streams: handle(*streams, *given), **listening)


@fake
async def canned(reader: Reader, writer: Writer, answer: bytes) -> None:
    """Answers the first request of each connection with the given bytes, and then closes the connection."""
    await reader.read(65536)
    writer.write(answer)
    writer.write_eof()
    await reader.read()  # if a request stays unread, closing resets the connection before the answer arrives


@fake
async def refusing(reader: Reader, writer: Writer, answer: bytes) -> None:
    """Answers when it has the beginning of a request, and closes the connection without the rest."""
    await reader.read(1)
    writer.write(answer)


@fake
async def cutting(reader: Reader, writer: Writer, protocol: str, requests: list[bytes]) -> None:
    """Reads and counts each request, and drops the connection instead of answering."""
    writer.write(HTTP2_SETTINGS if protocol == "grpc" else b"")
    requests.append(await reader.readuntil(b"TEXT"))


@fake
async def silent(reader: Reader, writer: Writer, beginning: bytes = b"", pause: float = 60.0) -> None:
    """Sends a beginning and then a byte after each pause, until the client has gone."""
    await reader.read(65536)
    writer.write(beginning)
    gone = asyncio.ensure_future(reader.read())
    while not (await asyncio.wait({gone}, timeout=pause))[0]:
        writer.write(b"x")
        await writer.drain()


@fake
async def reading_slowly(reader: Reader, writer: Writer, received: list[int]) -> None:
    """Reads piece by piece, much slower than a client sends."""
    while piece := await reader.read(65536):
        received.append(len(piece))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.005)


@fake
async def forwarding(reader: Reader, writer: Writer, target: str) -> None:
    """Passes what comes on to a server in plain text."""
    there = await asyncio.open_connection(*target.split(":"))
    await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))


async def _pump(source: Reader, sink: Writer) -> None:
    try:
        while piece := await source.read(1 << 16):
            sink.write(piece)
            await sink.drain()
    finally:
        sink.close()
