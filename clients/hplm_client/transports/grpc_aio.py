"""gRPC for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import InferenceServerException

from hplm_client.errors import ClientTimeout, HplmClientError, InvalidInput
from hplm_client.generation import Asked, Outputs, listed
from hplm_client.settings import Settings
from hplm_client.transports.grpc import CHANNEL, credentials, failure, refused, tells_no_more
from hplm_client.waiting import within

messages: Any = service_pb2  # protobuf makes its classes at run time
KINDS: dict[type, str] = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


class AsyncGrpcTransport:
    library = tritonclient.grpc

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        creds = credentials(settings)
        self._client = tritonclient.grpc.aio.InferenceServerClient(settings.address, creds=creds, channel_args=CHANNEL)
        self._channel = (
            grpc.aio.insecure_channel(settings.address, CHANNEL)
            if creds is None
            else grpc.aio.secure_channel(settings.address, creds, CHANNEL)
        )
        # tritonclient's own call sends its requests one after another. If the server ends the call before the first is sent,
        # grpc.aio reports that the sending failed, and drops the server's error. A call with one request reports the error.
        self._stream: Any = self._channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )

    async def infer(self, backbone: str, arguments: dict[str, Any], seconds: float) -> InferResult:
        return await self._call(self._client.infer, seconds, model_name=backbone, **arguments)

    async def generate(self, backbone: str, prompt: Asked, timeout_us: int | None, seconds: float) -> AsyncGenerator[Outputs]:
        """Yields responses. `seconds` limit the wait for each. To close the generator cancels the request."""
        metadata = tuple(self._settings.headers_for(prompt.parameters()).items())
        call = self._stream(_request(backbone, prompt, timeout_us), metadata=metadata)
        responses = aiter(call)
        try:
            while True:
                response = await within(anext(responses), seconds)
                if response.error_message:
                    raise refused(response.error_message, None, self._settings)
                result, outputs = InferResult(response.infer_response), response.infer_response.outputs
                yield {output.name: listed(result, output.name) for output in outputs}
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError as error:
            raise ClientTimeout(f"no answer from {self._settings.url} within {seconds:.3g} s") from error
        except grpc.RpcError as error:
            raise refused(error.details() or "", str(error.code()), self._settings) from error
        finally:
            call.cancel()

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
        await self._channel.close()
        await self._client.close()

    async def _call(self, method: Callable[..., Awaitable[Any]], seconds: float, **arguments: Any) -> Any:
        try:
            headers = self._settings.headers_for(arguments.get("parameters", {}))
            return await method(headers=headers, client_timeout=seconds, **arguments)
        except InferenceServerException as error:
            raise failure(error, self._settings, seconds) from error


def _request(backbone: str, prompt: Asked, timeout_us: int | None) -> Any:
    request = messages.ModelInferRequest(model_name=backbone)
    for name, value in prompt.inputs().items():
        tensor = request.inputs.add(name=name, datatype="BOOL" if isinstance(value, bool) else "BYTES", shape=[1])
        if isinstance(value, bool):
            tensor.contents.bool_contents.append(value)
        else:
            tensor.contents.bytes_contents.append(value.encode())
    parameters = prompt.parameters() if timeout_us is None else {**prompt.parameters(), "timeout": timeout_us}
    for name, value in parameters.items():
        kind = next((kind for own, kind in KINDS.items() if isinstance(value, own)), None)
        if kind is None:
            raise InvalidInput(f"{name} is {value!r}: give text, a number, or True or False")
        setattr(request.parameters[name], kind, value)
    return request
