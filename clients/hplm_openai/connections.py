"""Reads a client's request within limits, sends an answer while it grows, and ends the work when the client has gone."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hplm_client.errors import HplmClientError
from hplm_client.generation import Outputs
from hplm_client.waiting import within
from hplm_openai.answers import AnswerWriter
from hplm_openai.errors import Refused, refusal, wrong

SECONDS_FOR_A_BODY = 30.0
SECONDS_TO_READ = 60.0  # that a client may take to read a part of an answer
END = b"data: [DONE]\n\n"

ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
ID = b"x-request-id"
ID_FORM = re.compile(rb"[!-~]{1,256}")
T = TypeVar("T")
Numbered = tuple[int, Outputs]  # a response, and the number of the prompt that it answers


class Gone(Exception):
    """The client has closed its connection."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Does the work. Cancels it and raises Gone when the client closes the connection. The request's body was read before."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_leave(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Gone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, largest: int) -> dict[str, Any]:
    """Returns the JSON object that a request sends. `largest`: its bytes."""
    raw = await read_bytes(request, largest)
    try:
        body = json.loads(raw)
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # half of a surrogate pair has no UTF-8
    except (ValueError, RecursionError):
        raise wrong("the body is not JSON in UTF-8: send an object") from None
    if not isinstance(body, dict):
        raise wrong("the body is no JSON object: send one")
    return body


async def read_bytes(request: Request, largest: int) -> bytes:
    if "content-encoding" in request.headers:
        raise Refused(415, "the body is compressed: send it without Content-Encoding")
    try:
        return await within(_read(request, largest), SECONDS_FOR_A_BODY)
    except asyncio.TimeoutError:
        raise Refused(408, f"the body took more than {SECONDS_FOR_A_BODY:g} s to arrive: send it again") from None
    except ClientDisconnect:
        raise Gone from None


async def _read(request: Request, largest: int) -> bytes:
    too_large = Refused(413, f"the body has more than {largest:,} bytes: send a shorter text")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > largest:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > largest:
            raise too_large
    return bytes(body)


async def in_json(answer: Any) -> Response:
    """Returns an answer in JSON. Other requests go on while it is written: thousands of vectors take a second."""
    pieces: list[bytes] = []
    for piece in _pieces(answer):
        pieces.append(piece.encode())
        await asyncio.sleep(0)
    return Response(b"".join(pieces), media_type="application/json")


def _pieces(answer: Any) -> Iterator[str]:
    """Yields JSON, the items of lists one by one."""
    if isinstance(answer, dict) and answer:
        for mark, (name, value) in zip(chain("{", repeat(",")), answer.items(), strict=False):
            yield f"{mark}{ENCODE(name)}:"
            yield from _pieces(value)
        yield "}"
    elif isinstance(answer, list) and answer:
        yield from (mark + ENCODE(one) for mark, one in zip(chain("[", repeat(",")), answer, strict=False))
        yield "]"
    else:
        yield ENCODE(answer)


class Events(StreamingResponse):
    """An answer while it grows. Closes `responses` when all was sent, or the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, answer: AnswerWriter, first: Numbered, responses: AsyncGenerator[Numbered]) -> None:
        self._responses, self._parts = responses, _parts(answer, first, responses)
        super().__init__(self._parts, headers={"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def sent(part: Message) -> Awaitable[None]:
            return within(send(part), SECONDS_TO_READ)

        async with aclosing(self._responses), aclosing(self._parts):
            with suppress(Gone, asyncio.TimeoutError):
                await while_connected(receive, self.stream_response(sent))


async def _parts(answer: AnswerWriter, first: Numbered, responses: AsyncGenerator[Numbered]) -> AsyncGenerator[bytes]:
    try:
        yield _events(answer.chunks(*first))
        async for response in responses:
            yield _events(answer.chunks(*response))
        yield _events(answer.last_chunks()) + END
    except HplmClientError as error:
        yield _events([refusal(error, answer.request).body("/v1")])


async def together(several: list[AsyncGenerator[Outputs]]) -> AsyncGenerator[Numbered]:
    """Yields the responses to several prompts as they come, each with the number of its prompt. An error ends all."""
    came: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue()  # bounded by the answers, which a model bounds

    async def read(number: int, responses: AsyncGenerator[Outputs]) -> None:
        try:
            async with aclosing(responses):
                async for response in responses:
                    came.put_nowait((number, response))
            came.put_nowait(None)
        except Exception as error:
            came.put_nowait(error)

    if len(several) == 1:
        async with aclosing(several[0]):
            async for response in several[0]:
                yield 0, response
        return
    reading = [asyncio.create_task(read(*one)) for one in enumerate(several)]
    unended = len(several)
    try:
        while unended:
            match await came.get():
                case None:
                    unended -= 1
                case Exception() as error:
                    raise error
                case numbered:
                    yield numbered
    finally:
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)


def _events(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(chunk, ensure_ascii=False).encode() for chunk in chunks)


@dataclass
class Entrance:
    """Gives each request the id of its header or a new one, and tells it in the answer.

    Refuses requests while `most` are on their way. Those for the path `exempt` always pass.
    """

    app: ASGIApp
    most: int
    exempt: str
    _on_their_way: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == ID]
        is_wrong = len(given) > 1 or not all([ID_FORM.fullmatch(value) for value in given])
        own = given[0] if given and not is_wrong else b"req_" + secrets.token_hex(16).encode()
        scope.setdefault("state", {})["id"] = own.decode()

        async def named(part: Message) -> None:
            if part["type"] == "http.response.start":
                part["headers"] = [*part["headers"], (ID, own)]
            await send(part)

        counts, refused = scope["path"] != self.exempt, None
        if is_wrong:
            refused = wrong("the header x-request-id is not 1 to 256 printable characters without spaces: send it so, once")
        elif counts and self._on_their_way >= self.most:
            said, headers = f"{self._on_their_way} requests are on their way: retry after 1 s", {"retry-after": "1"}
            refused = Refused(503, said, "queue_full", None, headers)
        if refused:
            await refused.response(scope["path"])(scope, receive, named)
            return
        self._on_their_way += counts
        try:
            await self.app(scope, receive, named)
        finally:
            self._on_their_way -= counts
