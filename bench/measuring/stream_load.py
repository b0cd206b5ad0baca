"""Streams of generated text from a process of its own.

    python -m bench.measuring.stream_load HOST:PORT MODEL TENANT < requests

Each line of the input is a prompt and how many tokens follow it, as JSON. All are asked for at once. It prints the tokens a
second.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence

from hplm_client.aio import AsyncHplmClient
from loadtest.apart import run_module


def stream_rate(address: str, model: str, tenant: str, prompts: Sequence[str], lengths: Sequence[int]) -> float:
    """Returns the tokens a second of all streams together, over gRPC."""
    lines = "\n".join(json.dumps(one) for one in zip(prompts, lengths, strict=True))
    return float(run_module(__name__, address, model, tenant, given=lines, limit=600))


async def _load(address: str, model: str, tenant: str, asked: Sequence[tuple[str, int]]) -> float:
    async with AsyncHplmClient(address, protocol="grpc", backbone=model) as client:

        async def stream(prompt: str, tokens: int) -> int:
            pieces = client.stream(prompt, tenant=tenant, max_tokens=tokens, temperature=0, ignore_eos=True)
            return sum([piece.tokens async for piece in pieces])

        await stream(asked[0][0], 1)  # connects
        start = time.perf_counter()
        tokens = await asyncio.gather(*(stream(*one) for one in asked))
        return sum(tokens) / (time.perf_counter() - start)


def main() -> None:
    address, model, tenant = sys.argv[1:]
    asked = [json.loads(line) for line in sys.stdin]
    print(asyncio.run(_load(address, model, tenant, asked)))


if __name__ == "__main__":
    main()
