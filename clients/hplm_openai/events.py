"""An answer that is sent while it grows, as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hplm_client.errors import HplmClientError
from hplm_client.generation import Outputs
from hplm_client.waiting import within
from hplm_openai.answers import Answer
from hplm_openai.connections import Gone, while_connected
from hplm_openai.errors import refusal

SECONDS_TO_READ = 60.0  # that a client may take to read a part
END = b"data: [DONE]\n\n"


class Events(Response):
    """Closes `responses` when all was sent, or the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, first: Outputs, responses: AsyncGenerator[Outputs]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache"})
        self._answer = answer
        self._first = first
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._responses):
            with suppress(Gone, asyncio.TimeoutError):
                await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                if part:
                    said = send({"type": "http.response.body", "body": part, "more_body": True})
                    await within(said, SECONDS_TO_READ)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncGenerator[bytes]:
        answer = self._answer
        try:
            yield _events(answer.chunks(self._first))
            async for response in self._responses:
                yield _events(answer.chunks(response))
            yield _events(answer.last_chunks()) + END
        except HplmClientError as error:
            yield _events([refusal(error, answer.asked.key, answer.asked.fields).body])


def _events(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(chunk, ensure_ascii=False).encode() for chunk in chunks)
