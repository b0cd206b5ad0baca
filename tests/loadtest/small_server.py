"""A small HTTP server whose answers a test defines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tests.support.threaded_server import ThreadedServer

RESET = b"reset"  # instead of an answer: cuts the connection
SILENCE = b""


def answer(status: int = 200, body: bytes = b"{}", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} Any\r\nCONTENT-Length: {len(body)}\r\n{headers}\r\n".encode() + body


class SmallServer(ThreadedServer):
    """Calls `respond` with each request's number, in order of arrival, and its body."""

    def __init__(
        self,
        respond: Callable[[int, bytes], bytes] = lambda number, body: answer(),
        delay: float = 0.0,
        pair: Path | None = None,
    ) -> None:
        super().__init__(self._answer, pair)
        self.respond = respond
        self.delay = delay
        self.peers: set[str] = set()
        self.bodies: list[bytes] = []
        self.heads: list[bytes] = []

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peers.add(writer.get_extra_info("peername")[0])
        reply = b""
        while b"connection: close" not in reply.lower():
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            self.heads.append(head)
            self.bodies.append(await reader.readexactly(length))
            reply = self.respond(len(self.bodies) - 1, self.bodies[-1])
            await asyncio.sleep(self.delay)
            if reply == RESET:
                writer.transport.abort()
                return
            writer.write(reply)
            await writer.drain()
