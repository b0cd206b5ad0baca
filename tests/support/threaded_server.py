"""Servers on asyncio in a thread of their own, for tests that call them from another one."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import Self

from tests.support.wait import PATIENCE


class ThreadedServer:
    """Gives each connection to `handle`. With the file of a certificate and its key, it takes only TLS."""

    def __init__(
        self,
        handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]],
        pair: Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.connections, self.port = 0, port
        self._handle, self._host, self._tls = handle, host, None
        if pair is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(pair)
            self._tls.set_alpn_protocols(["h2", "http/1.1"])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"{self._host}:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.listener = self._call(asyncio.start_server(self._serve, self._host, self.port, ssl=self._tls))
        self.port = self.listener.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with suppress(OSError, asyncio.IncompleteReadError):  # the client has gone
                await self._handle(reader, writer)
        finally:
            writer.close()

    async def _end(self) -> None:
        self.listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


RESET = b"reset"  # instead of an answer: cuts the connection
SILENCE = b""


def answer(status: int = 200, body: bytes = b"{}", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} Any\r\nCONTENT-Length: {len(body)}\r\n{headers}\r\n".encode() + body


class SmallServer(ThreadedServer):
    """Calls `respond` with each request's number, in order of arrival, and its body."""

    def __init__(
        self,
        respond: Callable[[int, bytes], bytes] = lambda number, body: answer(),
        pair: Path | None = None,
    ) -> None:
        super().__init__(self._answer, pair)
        self.respond = respond
        self.peers: set[str] = set()
        self.bodies: list[bytes] = []

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peers.add(writer.get_extra_info("peername")[0])
        reply = b""
        while b"connection: close" not in reply.lower():
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            self.bodies.append(await reader.readexactly(length))
            reply = self.respond(len(self.bodies) - 1, self.bodies[-1])
            if reply == RESET:
                writer.transport.abort()
                return
            writer.write(reply)
            await writer.drain()
