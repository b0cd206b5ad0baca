"""A closed loop of gRPC requests: a load for `loadtest.load.send`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as aio

WARM_UP = 0.25  # share of the time before counting starts


@dataclass(frozen=True)
class GrpcLoad:
    """Requests of one text each, sent in turn by so many clients."""

    address: str
    model: str
    tenant: str
    texts: Sequence[str]
    clients: int
    seconds: float

    @property
    def limit_s(self) -> float:
        return 60 + 2 * self.seconds

    def run(self) -> float:
        """Returns the answers a second."""
        return asyncio.run(_load(self.address, self.model, self.tenant, self.texts, self.clients, self.seconds))


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
