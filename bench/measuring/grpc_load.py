"""A closed loop of gRPC requests from a process of its own.

python -m bench.measuring.grpc_load HOST:PORT MODEL TENANT CLIENTS SECONDS < texts

prints the answers a second.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as aio

from loadtest.apart import run_module

WARM_UP = 0.25  # share of the time before counting starts


def grpc_rate(address: str, model: str, tenant: str, texts: Sequence[str], clients: int, seconds: float) -> float:
    """Returns the answers a second to requests of one text each, sent in turn by so many clients."""
    given, limit = "\n".join(texts), 60 + 2 * seconds
    return float(run_module(__name__, address, model, tenant, clients, seconds, given=given, limit=limit))


async def _load(address: str, model: str, tenant: str, texts: Sequence[str], clients: int, seconds: float) -> float:
    start = time.perf_counter() + WARM_UP * seconds
    end = start + seconds
    inputs = [_text(text) for text in texts]
    answered = 0

    async def ask(first: int) -> None:
        nonlocal answered
        number = first
        while (now := time.perf_counter()) < end:
            await client.infer(model, inputs[number % len(inputs)], parameters={"tenant": tenant})
            answered += now >= start
            number += clients

    async with aio.InferenceServerClient(address) as client:
        await asyncio.gather(*map(ask, range(clients)))
    return answered / seconds


def _text(text: str) -> list[grpc.InferInput]:
    given = grpc.InferInput("TEXT", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[text.encode()]], dtype=object))
    return [given]


def main() -> None:
    address, model, tenant, clients, seconds = sys.argv[1:]
    texts = sys.stdin.read().splitlines()
    print(asyncio.run(_load(address, model, tenant, texts, int(clients), float(seconds))))


if __name__ == "__main__":
    main()
