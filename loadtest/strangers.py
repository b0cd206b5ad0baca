"""Clients without a key that misuse a reverse proxy: a load for `loadtest.load.send`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import ssl
import struct
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REFUSED_S = 5.0  # before a refused client tries again
A_BYTE_S = 1.0  # between two bytes of a slow client
PATIENCE_S = 60.0  # for a handshake, or for an answer to a whole body
PIECE = bytes(1 << 16)
POLITE = 10  # niceness: what is measured is the server
SILENT, SLOW_HEADERS, HALF_BODY = "silent", "slow headers", "half body"
WHOLE, CHUNKED = "whole", "chunked"
TENANT = "nobody"


@dataclass(frozen=True)
class Strangers:
    """`kinds` are taken in turn by the connections, and by each connection for its next request."""

    kinds: Sequence[str]
    address: str
    certificate: Path
    backbone: str
    connections: int
    sources: Sequence[str]  # the clients' own addresses
    body_bytes: int = 0
    seconds: float = 10.0

    @property
    def limit_s(self) -> float:
        return 2 * (self.seconds + PATIENCE_S)

    def run(self) -> dict[str, int]:
        """Returns how often clients were let in or refused, the statuses of their answers, and how many megabytes they sent."""
        os.nice(POLITE)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection takes a file
        return dict(asyncio.run(self._counted()))

    async def _counted(self) -> Counter[str]:
        counts: Counter[str] = Counter(let_in=0, refused=0, open_at_the_end=0, bytes=0)
        tls = ssl.create_default_context(cafile=self.certificate)
        ends = time.monotonic() + self.seconds
        tasks = [asyncio.create_task(self._go_on(number, tls, counts, ends)) for number in range(self.connections)]
        await asyncio.wait(tasks, timeout=self.seconds)
        found = counts.copy()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        found["megabytes"] = round(found.pop("bytes") / 1e6)
        return found

    async def _go_on(self, number: int, tls: ssl.SSLContext, counts: Counter[str], ends: float) -> None:
        """Connects again and again, until time is over."""
        host, _, port = self.address.rpartition(":")
        source = self.sources[number % len(self.sources)], 0
        for kind in itertools.islice(itertools.cycle(self.kinds), number % len(self.kinds), None):
            if time.monotonic() >= ends:
                return
            secured = None if kind == SILENT else tls
            try:
                connecting = asyncio.open_connection(host, int(port), ssl=secured, local_addr=source)
                reader, writer = await asyncio.wait_for(connecting, PATIENCE_S)
            except (OSError, asyncio.TimeoutError):  # errors of TLS are of the first class
                counts["refused"] += 1
                await asyncio.sleep(REFUSED_S)
                continue
            counts["let_in"] += 1
            counts["open_at_the_end"] += 1
            try:
                counts[await _status(reader, self._send(writer, kind, counts))] += 1
            finally:
                writer.transport.abort()
                counts["open_at_the_end"] -= 1
            if kind == SILENT:  # without TLS, this is how a refusal looks
                await asyncio.sleep(REFUSED_S)

    async def _send(self, writer: asyncio.StreamWriter, kind: str, counts: Counter[str]) -> None:
        if kind in (WHOLE, CHUNKED):
            await self._send_all(writer, kind == CHUNKED, counts)
        elif kind == HALF_BODY:
            writer.write(self._head("Content-Length: 1000") + b"{")
        elif kind == SLOW_HEADERS:
            writer.write(self._head("X-Slow: ").rstrip(b"\r\n"))
            while True:
                await asyncio.sleep(A_BYTE_S)
                writer.write(b"x")

    async def _send_all(self, writer: asyncio.StreamWriter, chunked: bool, counts: Counter[str]) -> None:
        """Sends a text of so many bytes as fast as it is taken."""
        left = self.body_bytes
        text = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": left + 4}}
        announced = json.dumps({"inputs": [text], "parameters": {"tenant": TENANT}}).encode()
        piece = announced + struct.pack("<I", left)
        size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(piece) + left}"
        writer.write(self._head(f"{size}\r\nInference-Header-Content-Length: {len(announced)}"))
        while piece and not writer.is_closing():
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
            await asyncio.sleep(0)  # `drain` alone would not let the answer be read
            counts["bytes"] += len(piece)
            piece = PIECE[:left]
            left -= len(piece)
        if chunked:
            writer.write(b"0\r\n\r\n")

    def _head(self, fields: str) -> bytes:
        return f"POST /v2/models/{self.backbone}/infer HTTP/1.1\r\nHost: loadtest\r\n{fields}\r\n\r\n".encode()


async def _status(reader: asyncio.StreamReader, sending: Coroutine[None, None, None]) -> str:
    """Returns the status of the answer, which may come while the request is still being sent."""
    sender = asyncio.create_task(sending)
    try:
        head = await reader.readline()
    except OSError:
        return "reset"
    finally:
        sender.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await sender
    return head.split()[1].decode() if head.startswith(b"HTTP/") else "closed"  # else at most an alert of TLS
