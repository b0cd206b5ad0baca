"""A small HTTP server whose answers a test defines."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from types import TracebackType

RESET = b"reset"  # instead of an answer: cuts the connection
SILENCE = b""


def answer(status: int = 200, body: bytes = b"{}", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} Any\r\nCONTENT-Length: {len(body)}\r\n{headers}\r\n".encode() + body


class SmallServer:
    """Calls `respond` with each request's number, in order of arrival, and its body. Runs in a thread of its own."""

    def __init__(
        self,
        respond: Callable[[int, bytes], bytes] = lambda number, body: answer(),
        delay: float = 0.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.respond = respond
        self.delay = delay
        self.tls = tls
        self.peers: set[str] = set()
        self.bodies: list[bytes] = []
        self.heads: list[bytes] = []
        self.connections = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> SmallServer:
        self.thread.start()
        self.server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls))
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._call(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=10)

    async def _end(self) -> None:
        self.server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.peers.add(writer.get_extra_info("peername")[0])
        try:
            while True:
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
                if b"connection: close" in reply.lower():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client has closed the connection
        finally:
            writer.close()
