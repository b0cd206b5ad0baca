"""A load over gRPC: requests in flight."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hplm.errors import HplmError
from hplm_client.errors import ConnectionFailed, SafeToRetry, refusal

MESSAGES: Any = service_pb2  # generated code, without types
OUTPUTS = "LABEL", "SCORE"
A_CHANNEL = 100  # requests at once: as many streams as servers usually allow on a connection
REFUSED_S = 0.1  # the pause after a refusal that does not name one
PATIENCE_S = 30.0  # how long the last answers may take


@dataclass
class GrpcReport:
    answered: int = 0
    refused: int = 0
    failed: int = 0
    cut_off: int = 0  # requests that lost their connection
    unanswered: int = 0
    seconds: float = 0.0  # from the first request that counts to the last answer

    def expect_success(self, of: str) -> None:
        """Raises if a request was not answered, for measurements that failures would make meaningless."""
        if not self.answered or self.refused or self.failed or self.cut_off or self.unanswered:
            raise HplmError(f"{of}: nothing was measured ({self}): read the server's log, then give the command again")


@dataclass(frozen=True)
class GrpcLoad:
    """Requests of one text each, in turn: each that is answered is followed by another, for so many seconds.

    After a refusal the next request waits as long as the server asks for. The last answers are waited for, so that there are
    some on a busy machine too.
    """

    address: str
    model: str
    tenant: str
    texts: Sequence[str]
    in_flight: int
    seconds: float = 10.0
    warm_up_s: float = 0.0  # how long answers do not count at first
    certificate: Path | None = None  # for TLS
    niceness: int = 0

    @property
    def limit_s(self) -> float:
        return 120 + self.warm_up_s + self.seconds + PATIENCE_S

    def run(self) -> GrpcReport:
        os.nice(self.niceness)
        return asyncio.run(self._run())

    async def _run(self) -> GrpcReport:
        report = GrpcReport()
        channels = [self._channel() for _ in range(-(-self.in_flight // A_CHANNEL))]
        stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]
        requests = [self._request(text) for text in self.texts]
        start = last = time.monotonic() + self.warm_up_s
        end = start + self.seconds

        async def ask(number: int) -> None:
            nonlocal last
            stub = stubs[number % len(stubs)]
            while time.monotonic() < end:
                try:
                    # Without a connection it waits for one. To ask in vain again and again would take the cores of the server.
                    await stub.ModelInfer(requests[number % len(requests)], wait_for_ready=True)
                    now = time.monotonic()
                    report.answered += now >= start
                    last = max(last, now)
                except grpc.aio.AioRpcError as error:
                    kind, pause = _judged(error)
                    setattr(report, kind, getattr(report, kind) + 1)
                    await asyncio.sleep(pause)
                number += self.in_flight

        tasks = [asyncio.create_task(ask(number)) for number in range(self.in_flight)]
        done, unanswered = await asyncio.wait(tasks, timeout=end - time.monotonic() + PATIENCE_S)
        for task in unanswered:
            task.cancel()
        await asyncio.gather(*unanswered, return_exceptions=True)
        for channel in channels:
            await channel.close()
        for task in done:
            task.result()  # raises what was not expected
        report.unanswered = len(unanswered)
        report.seconds = last - start
        return report

    def _channel(self) -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]  # otherwise all channels share one connection
        if self.certificate is None:
            return grpc.aio.insecure_channel(self.address, options)
        return grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(self.certificate.read_bytes()), options)

    def _request(self, text: str) -> Any:
        encoded = text.encode()
        request = MESSAGES.ModelInferRequest(model_name=self.model)
        request.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
        request.raw_input_contents.append(struct.pack("<I", len(encoded)) + encoded)
        for name in OUTPUTS:
            request.outputs.add(name=name)
        for name, value in {"tenant": self.tenant, "outputs": ",".join(OUTPUTS)}.items():
            request.parameters[name].string_param = value
        return request


def _judged(error: grpc.aio.AioRpcError) -> tuple[str, float]:
    """Returns what an error counts as, and the pause after it."""
    problem = refusal(error.details() or "", str(error.code()))
    if isinstance(problem, ConnectionFailed):
        return "cut_off", REFUSED_S
    pause = problem.retry_after_s if isinstance(problem, SafeToRetry) else None
    return "refused" if error.code() == grpc.StatusCode.UNAVAILABLE else "failed", pause or REFUSED_S
