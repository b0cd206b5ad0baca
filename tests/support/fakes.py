"""Fakes of servers on a free port of this machine: of any bytes, of HTTP, or of HTTP and gRPC as Triton has them."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc
from typing_extensions import Self

from tests.support.wait import PATIENCE

HOST = "127.0.0.1"
THREADS = 256  # requests that are held at once, over HTTP and over gRPC
RESET = b"reset"  # instead of an answer: cuts the connection
SILENCE = b""


class Listener:
    """Gives each connection to `handle`, on a loop in a thread of its own. It runs while a `with` block does.

    With the file of a certificate and its key, it takes only TLS. After `stop` its port refuses connections until `start`.
    """

    def __init__(
        self,
        handle: Callable[[StreamReader, StreamWriter], Awaitable[object]],
        pair: Path | None = None,
        host: str = HOST,
        port: int = 0,
    ) -> None:
        self.connections, self.port = 0, port
        self._handle, self._host, self._tls = handle, host, None
        if pair is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(pair)
            self._tls.set_alpn_protocols(["h2", "http/1.1"])
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"{self._host}:{self.port}"

    def start(self) -> None:
        self.listener = self.call(asyncio.start_server(self._serve, self._host, self.port, ssl=self._tls, backlog=THREADS))
        self.port = self.listener.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Closes the port and all connections, as the end of a process does."""
        self.call(self._end())

    def close(self) -> None:
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
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


def answer(status: int = 200, body: bytes = b"{}", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} Any\r\nCONTENT-Length: {len(body)}\r\n{headers}\r\n".encode() + body


@dataclass
class Asked:
    """A request over HTTP. Names of headers are in small letters."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    server: Listener
    streams: tuple[StreamReader, StreamWriter]

    def write(self, data: bytes) -> None:
        self.server.loop.call_soon_threadsafe(self.streams[1].write, data)

    def say(self, status: int, head: Any, blobs: bytes = b"") -> None:
        """Answers in JSON, with tensors in binary behind it."""
        text = json.dumps(head).encode()
        self.write(answer(status, text + blobs, f"inference-header-content-length: {len(text)}\r\n" if blobs else ""))

    def until_gone(self) -> None:
        """Returns when the client has closed the connection."""
        self.server.call(self.streams[0].read(1))


class FakeHttp(Listener):
    """Answers each request by `over_http` in a thread, or by `take_up` on the loop."""

    def __init__(self, pair: Path | None = None) -> None:
        super().__init__(self._requests, pair)
        self.threads = ThreadPoolExecutor(THREADS)

    def over_http(self, asked: Asked) -> None:
        raise NotImplementedError

    async def take_up(self, asked: Asked) -> None:
        await self.loop.run_in_executor(self.threads, self.over_http, asked)

    def close(self) -> None:
        super().close()
        self.threads.shutdown()

    async def _requests(self, reader: StreamReader, writer: StreamWriter) -> None:
        while not writer.is_closing():
            head = await reader.readuntil(b"\n")
            if b" HTTP/1." not in head:  # but TLS, or HTTP/2 as gRPC speaks it
                writer.write(answer(400))
                return
            while not head.endswith(b"\r\n\r\n"):
                head += await reader.readuntil(b"\n")
            first, *lines = head.decode("latin-1").splitlines()[:-1]
            fields = (line.partition(":") for line in lines)
            headers = {name.lower(): value.strip() for name, _, value in fields}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self.take_up(Asked(*first.split()[:2], headers, body, self, (reader, writer)))
            await writer.drain()
            if headers.get("connection", "").lower() == "close":
                return


class SmallServer(FakeHttp):
    """Calls `respond` with each request's number, in order of arrival, and its body."""

    def __init__(
        self,
        respond: Callable[[int, bytes], bytes] = lambda number, body: answer(),
        pair: Path | None = None,
    ) -> None:
        super().__init__(pair)
        self.respond = respond
        self.peers: set[str] = set()
        self.bodies: list[bytes] = []

    async def take_up(self, asked: Asked) -> None:
        writer = asked.streams[1]
        self.peers.add(writer.get_extra_info("peername")[0])
        self.bodies.append(asked.body)
        reply = self.respond(len(self.bodies) - 1, asked.body)
        if reply == RESET:
            writer.transport.abort()
            return
        writer.write(reply)
        if b"connection: close" in reply.lower():
            writer.close()


class FakeEndpoints(FakeHttp, service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers over gRPC by the servicer's methods. `stop` stops HTTP only."""

    def __init__(self) -> None:
        super().__init__()
        self._grpc = grpc.server(self.threads, options=[("grpc.max_receive_message_length", -1)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._grpc)
        self.grpc_url = f"{HOST}:{self._grpc.add_insecure_port(f'{HOST}:0')}"
        self._grpc.start()

    @property
    def http_url(self) -> str:
        return self.url

    def close(self) -> None:
        self._grpc.stop(None).wait()
        super().close()
