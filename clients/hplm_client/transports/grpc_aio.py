"""gRPC for asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import InferResult
from tritonclient.utils import InferenceServerException

from hplm_client.settings import Settings
from hplm_client.transports.grpc import CHANNEL, failure


class AsyncGrpcTransport:
    library = tritonclient.grpc

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = tritonclient.grpc.aio.InferenceServerClient(settings.url, channel_args=CHANNEL)

    async def infer(self, backbone: str, arguments: dict[str, Any], seconds: float) -> InferResult:
        return await self._call(self._client.infer, seconds, model_name=backbone, **arguments)

    async def ready(self, backbone: str | None, seconds: float) -> bool:
        return await self._call(self._client.is_server_ready, seconds) and (
            backbone is None or await self._call(self._client.is_model_ready, seconds, model_name=backbone)
        )

    async def statistics(self, seconds: float) -> dict[str, Any]:
        return await self._call(self._client.get_inference_statistics, seconds, as_json=True)

    async def close(self) -> None:
        await self._client.close()

    async def _call(self, method: Callable[..., Awaitable[Any]], seconds: float, **arguments: Any) -> Any:
        try:
            return await method(headers=self._settings.headers, client_timeout=seconds, **arguments)
        except InferenceServerException as error:
            raise failure(error, self._settings, seconds) from error
