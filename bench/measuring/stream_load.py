"""Streams of generated text: a load for `loadtest.load.send`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hplm_client.aio import AsyncHplmClient


@dataclass(frozen=True)
class TextStreams:
    """Prompts, and how many tokens follow each. All are asked at once, over gRPC."""

    address: str
    model: str
    tenant: str
    asked: Sequence[tuple[str, int]]
    limit_s: float = 600.0

    def run(self) -> float:
        """Returns the tokens a second of all streams together."""
        return asyncio.run(_load(self.address, self.model, self.tenant, self.asked))


async def _load(address: str, model: str, tenant: str, asked: Sequence[tuple[str, int]]) -> float:
    async with AsyncHplmClient(address, protocol="grpc", backbone=model) as client:

        async def stream(prompt: str, tokens: int) -> int:
            pieces = client.stream(prompt, tenant=tenant, max_tokens=tokens, temperature=0, ignore_eos=True)
            return sum([piece.tokens async for piece in pieces])

        await stream(asked[0][0], 1)  # connects
        start = time.perf_counter()
        tokens = await asyncio.gather(*(stream(*one) for one in asked))
        return sum(tokens) / (time.perf_counter() - start)
