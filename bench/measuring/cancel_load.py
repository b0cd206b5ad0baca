"""Streams that are cancelled on their way: a load for `loadtest.load.send`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from hplm_client.aio import AsyncHplmClient

BEFORE, BESIDE = 4, 8  # pieces of a stream before the other request is sent, and before the stream is cancelled


@dataclass(frozen=True)
class CancelTimes:
    cancel_ms: float  # from the cancelling to the first token behind it
    token_ms: float  # between two tokens


@dataclass(frozen=True)
class Cancelling:
    """A stream of one tenant takes all the room of the server, and is cancelled while a request of another one waits for it."""

    address: str
    model: str
    holding: str  # the tenant whose streams are cancelled
    waiting: str
    tokens: int  # of a stream that is not cancelled
    count: int
    limit_s: float = 600.0

    def run(self) -> CancelTimes:
        """Returns the medians."""
        return asyncio.run(self._run())

    async def _run(self) -> CancelTimes:
        async with AsyncHplmClient(self.address, protocol="grpc", backbone=self.model) as client:
            return await _measured(client, self.holding, self.waiting, self.tokens, self.count)


class Holding:
    """A stream that takes the server's room until it is cancelled."""

    def __init__(self, client: AsyncHplmClient, prompt: str, tenant: str, tokens: int) -> None:
        self.pieces: list[tuple[float, int]] = []  # when each came, and its tokens
        self._came = asyncio.Event()
        pieces = client.stream(prompt, tenant=tenant, max_tokens=tokens, temperature=0, ignore_eos=True)

        async def read() -> None:
            async for piece in pieces:
                self.pieces.append((time.perf_counter(), piece.tokens))
                self._came.set()

        self._reading = asyncio.create_task(read())

    async def until(self, count: int) -> None:
        """Waits until so many pieces have come."""
        while len(self.pieces) < count:
            self._came.clear()
            came = asyncio.create_task(self._came.wait())
            await asyncio.wait([came, self._reading], return_when=asyncio.FIRST_COMPLETED)
            if self._reading.done():
                self._reading.result()  # raises its error
                raise RuntimeError("a stream ended before it was cancelled")

    def cancel(self) -> None:
        self._reading.cancel()


async def _measured(client: AsyncHplmClient, holding: str, waiting: str, tokens: int, count: int) -> CancelTimes:
    took: list[float] = []
    gaps: list[float] = []
    for number in range(count + 1):
        held = Holding(client, f"held {number}", holding, tokens)
        await held.until(BEFORE)
        next_one = asyncio.create_task(client.generate(f"next {number}", tenant=waiting, max_tokens=1, ignore_eos=True))
        await held.until(BEFORE + BESIDE)
        if next_one.done():
            raise RuntimeError("a request was answered beside a stream: the server has room for both")
        start = time.perf_counter()
        held.cancel()
        await next_one
        if number:  # the first one warms up
            took.append(time.perf_counter() - start)
            gaps += [(then - before) / max(1, added) for (before, _), (then, added) in pairwise(held.pieces)]
    return CancelTimes(1000 * median(took), 1000 * median(gaps))
