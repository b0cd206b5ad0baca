"""gRPC for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import InferResult
from tritonclient.utils import InferenceServerException

from hplm_client.errors import ClientTimeout, HplmClientError
from hplm_client.generation import Asked, Outputs, listed, tensors_of
from hplm_client.settings import Settings
from hplm_client.transports.grpc import CHANNEL, credentials, failure, refused, tells_no_more
from hplm_client.waiting import within


class AsyncGrpcTransport:
    library = tritonclient.grpc

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = tritonclient.grpc.aio.InferenceServerClient(
            settings.address, creds=credentials(settings), channel_args=CHANNEL
        )

    async def infer(self, backbone: str, arguments: dict[str, Any], seconds: float) -> InferResult:
        return await self._call(self._client.infer, seconds, model_name=backbone, **arguments)

    async def generate(self, backbone: str, prompt: Asked, timeout_us: int | None, seconds: float) -> AsyncGenerator[Outputs]:
        """Yields responses. `seconds` limit the wait for each. To close the generator cancels the request."""

        async def asked() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": backbone,
                "inputs": tensors_of(prompt.inputs(), self.library, [1]),
                "timeout": timeout_us,
                "parameters": prompt.parameters(),
            }

        responses: Any = self._client.stream_infer(asked(), headers=self._settings.headers_for(prompt.parameters()))
        try:
            while True:
                result, error = await within(anext(responses), seconds)
                if error is not None:
                    raise failure(error, self._settings, seconds)
                yield {output.name: listed(result, output.name) for output in result.get_response().outputs}
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError as error:
            raise ClientTimeout(f"no answer from {self._settings.url} within {seconds:.3g} s") from error
        except grpc.RpcError as error:
            raise refused(error.details() or "", str(error.code()), self._settings) from error
        finally:
            responses.cancel()

    async def metadata(self, model: str, seconds: float) -> dict[str, Any]:
        return await self._call(self._client.get_model_metadata, seconds, model_name=model, as_json=True)

    async def ready(self, backbone: str | None, seconds: float) -> bool:
        if not await self._call(self._client.is_server_ready, seconds):
            return False
        if backbone is None:
            return True
        try:
            return await self._call(self._client.is_model_ready, seconds, model_name=backbone)
        except HplmClientError as error:
            return tells_no_more(error)

    async def statistics(self, seconds: float) -> dict[str, Any]:
        return await self._call(self._client.get_inference_statistics, seconds, as_json=True)

    async def close(self) -> None:
        await self._client.close()

    async def _call(self, method: Callable[..., Awaitable[Any]], seconds: float, **arguments: Any) -> Any:
        try:
            headers = self._settings.headers_for(arguments.get("parameters", {}))
            return await method(headers=headers, client_timeout=seconds, **arguments)
        except InferenceServerException as error:
            raise failure(error, self._settings, seconds) from error
