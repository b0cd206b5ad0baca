"""A server that speaks TLS, with a certificate of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from loadtest.door import make_certificate, missing_programs
from tests.support.threaded_server import ThreadedServer


def certificate_and_pair(folder: Path) -> tuple[Path, Path]:
    """Returns the files of a new certificate for localhost and 127.0.0.1, and of the same with its key."""
    if "openssl" in missing_programs():
        pytest.skip("no openssl on PATH")
    return make_certificate(folder)


class TlsForwarder(ThreadedServer):
    """Takes connections with TLS, and passes what comes on to a server in plain text."""

    def __init__(self, pair: Path, target: str, host: str = "127.0.0.1") -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pair)
        context.set_alpn_protocols(["h2", "http/1.1"])
        super().__init__(host, context)
        self._target = target.split(":")

    @property
    def url(self) -> str:
        return f"{self._host}:{self.port}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
