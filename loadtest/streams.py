"""Holds many gRPC requests in flight, from a process of its own: each that is answered is followed by another.

    python -m loadtest.streams HOST:PORT MODEL TENANT IN_FLIGHT SECONDS [CERTIFICATE] < text

prints what became of them as JSON. After a refusal the next request waits as long as the server asks for.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hplm_client.errors import ConnectionFailed, SafeToRetry, refusal
from loadtest.apart import run_module

MESSAGES: Any = service_pb2  # generated code, without types
A_CHANNEL = 100  # requests at once: as many streams as servers usually allow on a connection
REFUSED_S = 0.1  # the pause after a refusal that does not name one
POLITE = 10  # niceness: what is measured is the server


def run_streams(
    address: str, model: str, tenant: str, text: str, in_flight: int, seconds: float, certificate: Path | None = None
) -> dict[str, int]:
    """Returns how many requests were answered, refused, failed, or still in flight at the end. `certificate`: for TLS.

    Also how many lost their connection.
    """
    given = address, model, tenant, in_flight, seconds, *([certificate] if certificate else [])
    return json.loads(run_module(__name__, *given, given=text, limit=120 + 2 * seconds))


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


def main() -> None:
    address, model, tenant, in_flight, seconds, *certificate = sys.argv[1:]
    os.nice(POLITE)
    text = sys.stdin.read().encode()
    request = MESSAGES.ModelInferRequest(model_name=model)
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(struct.pack("<I", len(text)) + text)
    request.parameters["tenant"].string_param = tenant
    trusted = Path(certificate[0]).read_bytes() if certificate else None
    print(json.dumps(asyncio.run(_hold(address, request, int(in_flight), float(seconds), trusted))))


if __name__ == "__main__":
    main()
