"""Holds many gRPC requests in flight: each that is answered is followed by another. A load for `loadtest.load.send`.

After a refusal the next request waits as long as the server asks for.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hplm_client.errors import ConnectionFailed, SafeToRetry, refusal

MESSAGES: Any = service_pb2  # generated code, without types
A_CHANNEL = 100  # requests at once: as many streams as servers usually allow on a connection
REFUSED_S = 0.1  # the pause after a refusal that does not name one
POLITE = 10  # niceness: what is measured is the server


@dataclass(frozen=True)
class Streams:
    address: str
    model: str
    tenant: str
    text: str
    in_flight: int
    certificate: Path | None  # for TLS
    seconds: float = 10.0

    @property
    def limit_s(self) -> float:
        return 120 + 2 * self.seconds

    def run(self) -> dict[str, int]:
        """Returns how many requests were answered, refused or failed, lost their connection, or were in flight at the end."""
        os.nice(POLITE)
        text = self.text.encode()
        request = MESSAGES.ModelInferRequest(model_name=self.model)
        request.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
        request.raw_input_contents.append(struct.pack("<I", len(text)) + text)
        request.parameters["tenant"].string_param = self.tenant
        trusted = self.certificate.read_bytes() if self.certificate else None
        return dict(asyncio.run(_hold(self.address, request, self.in_flight, self.seconds, trusted)))


async def _hold(address: str, request: Any, in_flight: int, seconds: float, certificate: bytes | None) -> Counter[str]:
    counts: Counter[str] = Counter(answered=0, refused=0, failed=0, cut_off=0)
    end = time.monotonic() + seconds

    async def ask(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
        while time.monotonic() < end:
            try:
                # Without a connection it waits for one. To ask in vain again and again would take the cores of the server.
                await stub.ModelInfer(request, wait_for_ready=True)
                counts["answered"] += 1
            except grpc.aio.AioRpcError as error:
                kind, pause = _judged(error)
                counts[kind] += 1
                await asyncio.sleep(pause)

    def channel() -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]  # otherwise all channels share one connection
        if certificate is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(certificate), options)

    channels = [channel() for _ in range(-(-in_flight // A_CHANNEL))]
    stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]
    tasks = [asyncio.create_task(ask(stubs[number % len(stubs)])) for number in range(in_flight)]
    _, unanswered = await asyncio.wait(tasks, timeout=seconds)
    for task in unanswered:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for one in channels:
        await one.close()
    counts["in_flight_at_the_end"] = len(unanswered)
    return counts


def _judged(error: grpc.aio.AioRpcError) -> tuple[str, float]:
    """Returns what an error counts as, and the pause after it."""
    problem = refusal(error.details() or "", str(error.code()))
    if isinstance(problem, ConnectionFailed):
        return "cut_off", REFUSED_S
    pause = problem.retry_after_s if isinstance(problem, SafeToRetry) else None
    return "refused" if error.code() == grpc.StatusCode.UNAVAILABLE else "failed", pause or REFUSED_S
