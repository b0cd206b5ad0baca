"""gRPC for asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from hplm_client.settings import Settings
from hplm_client.transports.grpc import GrpcCalls
from hplm_client.waiting import within


class AsyncGrpcTransport(GrpcCalls):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, grpc.aio)

    def _next_of(self, call: Any) -> Callable[[float], Awaitable[Any]]:
        responses = aiter(call)

        async def following(seconds: float) -> Any:
            try:
                return await within(anext(responses), seconds)
            except StopAsyncIteration:
                return None

        return following
