"""Streams that are cancelled on their way, in a process of its own as those of `stream_load`.

    python -m bench.measuring.cancel_load HOST:PORT MODEL HOLDING WAITING TOKENS COUNT

A stream of the tenant HOLDING takes all the room of the server, and is cancelled while a request of the tenant WAITING waits
for it. It prints the medians of `COUNT` times: from the cancelling to the first token behind it, and between two tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from hplm_client.aio import AsyncHplmClient
from loadtest.apart import run_module

BEFORE, BESIDE = 4, 8  # pieces of a stream before the other request is sent, and before the stream is cancelled


@dataclass(frozen=True)
class CancelTimes:
    cancel_ms: float
    token_ms: float


def cancel_times(address: str, model: str, tenants: Sequence[str], tokens: int, count: int) -> CancelTimes:
    """Returns the medians. `tenants`: one whose streams are cancelled, and one whose requests wait."""
    return CancelTimes(**json.loads(run_module(__name__, address, model, *tenants, tokens, count, given="", limit=600)))


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


async def _load(address: str, model: str, holding: str, waiting: str, tokens: int, count: int) -> CancelTimes:
    async with AsyncHplmClient(address, protocol="grpc", backbone=model) as client:
        return await _measured(client, holding, waiting, tokens, count)


def main() -> None:
    address, model, holding, waiting, tokens, count = sys.argv[1:]
    print(json.dumps(asdict(asyncio.run(_load(address, model, holding, waiting, int(tokens), int(count))))))


if __name__ == "__main__":
    main()
