"""A server that speaks TLS, with a certificate of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from pathlib import Path

import pytest

from loadtest.door import make_certificate, missing_programs


def certificate_and_pair(folder: Path) -> tuple[Path, Path]:
    """Returns the files of a new certificate for localhost and 127.0.0.1, and of the same with its key."""
    if "openssl" in missing_programs():
        pytest.skip("no openssl on PATH")
    return make_certificate(folder)


class TlsForwarder:
    """Takes connections with TLS, and passes what comes on to a server in plain text."""

    def __init__(self, pair: Path, target: str, host: str = "127.0.0.1") -> None:
        self.connections = 0
        self._target = target.split(":")
        self._host = host
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(pair)
        self._context.set_alpn_protocols(["h2", "http/1.1"])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> TlsForwarder:
        self._thread.start()
        starting = asyncio.start_server(self._serve, self._host, 0, ssl=self._context)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(30)
        self.url = f"{self._host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError):  # one of the two has closed
            there = await asyncio.open_connection(*self._target)
            await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while piece := await source.read(1 << 16):
            sink.write(piece)
            await sink.drain()
    finally:
        sink.close()
