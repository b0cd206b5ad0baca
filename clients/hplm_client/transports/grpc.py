"""gRPC: the calls, which need a channel, and the transports. Threads share one channel with one HTTP/2 connection."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from hplm_client import wire
from hplm_client.errors import GRPC_CUT_OFF, GRPC_NOT_SENT, HplmClientError, refusal
from hplm_client.generation import UNIMPLEMENTED, Outputs, PromptLike, listed, tensors_of
from hplm_client.settings import ClientSettings
from hplm_client.tls import NEEDED, NOT_SPOKEN, not_trusted
from hplm_client.waiting import within

# By default gRPC limits the size of messages. It also waits a second after a refused connection, and fails all calls in between
# without trying. So the first wait is shorter here.
CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
# gRPC reports failures of TLS by text only.
NOT_TRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed", "is not in peer certificate")
NO_TLS = ("andshake", "ALPN")
NO_HTTP_2 = "Expected SETTINGS frame"
PARAMETER_FIELDS: dict[type, str] = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}

messages: Any = service_pb2  # protobuf makes its classes at run time


class GrpcCalls:
    """The calls over a channel. `library` is `grpc` or `grpc.aio`."""

    def __init__(self, settings: ClientSettings, library: Any) -> None:
        self._settings = settings
        self._channel = _channel(settings, library)
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # The stub's own call sends a stream of requests. If the server ends it before the first is sent, grpc.aio reports that
        # the sending failed, and drops the server's error. A call with one request reports the error.
        self._one_request: Any = self._channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )

    def _next_of(self, call: Any) -> Callable[[float], Awaitable[Any]]:
        """Returns a function that returns a call's next response, or None after the last. It waits some seconds at most."""
        raise NotImplementedError

    async def infer(self, backbone: str, request: wire.InferRequest, timeout_us: int | None, seconds: float) -> InferResult:
        message = _message(backbone, request, timeout_us)
        return InferResult(await self._call("ModelInfer", message, seconds, request))

    async def generate(
        self, backbone: str, prompt: PromptLike, timeout_us: int | None, seconds: float, part_s: float | None = None
    ) -> AsyncGenerator[Outputs]:
        """Yields responses. `seconds` limit the wait for each, `part_s` for later ones. To close it cancels the request."""
        request = wire.InferRequest(tensors_of(prompt.inputs()), prompt.parameters(), (), prompt.id or "", prompt.key)
        call = self._one_request(_message(backbone, request, timeout_us), metadata=self._metadata(request))
        following = self._next_of(call)
        try:
            while (response := await following(seconds)) is not None:
                if response.error_message:
                    raise refused(response.error_message, None, self._settings)
                result, outputs = InferResult(response.infer_response), response.infer_response.outputs
                yield {output.name: listed(result, output.name) for output in outputs}
                seconds = part_s or seconds
        except (queue.Empty, asyncio.TimeoutError):
            raise self._settings.timed_out(seconds) from None
        except grpc.RpcError as error:
            raise self._failure(error, seconds) from error
        finally:
            call.cancel()

    async def metadata(self, model: str, seconds: float) -> dict[str, Any]:
        found = await self._call("ModelMetadata", messages.ModelMetadataRequest(name=model), seconds)
        return {"inputs": [{"name": one.name} for one in found.inputs]}

    async def ready(self, backbone: str | None, seconds: float) -> bool:
        if not (await self._call("ServerReady", messages.ServerReadyRequest(), seconds)).ready:
            return False
        if backbone is None:
            return True
        try:
            return (await self._call("ModelReady", messages.ModelReadyRequest(name=backbone), seconds)).ready
        except HplmClientError as error:
            if error.status == UNIMPLEMENTED:  # the front door does not tell the state of models
                return True
            raise

    async def statistics(self, seconds: float) -> dict[str, Any]:
        found = await self._call("ModelStatistics", messages.ModelStatisticsRequest(), seconds)
        return {"model_stats": [{"name": one.name} for one in found.model_stats]}

    async def close(self) -> None:
        closing = self._channel.close()
        if inspect.isawaitable(closing):
            await closing

    async def _call(self, method: str, message: Any, seconds: float, request: wire.InferRequest | None = None) -> Any:
        try:
            answer = getattr(self._stub, method)(message, timeout=seconds, metadata=self._metadata(request))
            return await within(answer, None) if inspect.isawaitable(answer) else answer
        except grpc.RpcError as error:
            raise self._failure(error, seconds) from error

    def _metadata(self, request: wire.InferRequest | None) -> tuple[tuple[str, str], ...]:
        headers = self._settings.headers() if request is None else self._settings.headers(request.parameters, request.key)
        return tuple(headers.items())

    def _failure(self, error: Any, seconds: float) -> HplmClientError:
        """Turns an error of gRPC into one of ours."""
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._settings.timed_out(seconds)
        return refused(error.details() or "", str(error.code()), self._settings)


class GrpcTransport(GrpcCalls):
    def __init__(self, settings: ClientSettings) -> None:
        super().__init__(settings, grpc)

    def _next_of(self, call: Any) -> Callable[[float], Awaitable[Any]]:
        # A thread reads the responses, because the call's own iterator waits for the next one without a limit.
        responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(call, responses), daemon=True).start()

        async def following(seconds: float) -> Any:
            response = responses.get(timeout=seconds)
            if isinstance(response, grpc.RpcError):
                raise response
            return response

        return following


class AsyncGrpcTransport(GrpcCalls):
    def __init__(self, settings: ClientSettings) -> None:
        super().__init__(settings, grpc.aio)

    def _next_of(self, call: Any) -> Callable[[float], Awaitable[Any]]:
        responses = aiter(call)

        async def following(seconds: float) -> Any:
            try:
                return await within(anext(responses), seconds)
            except StopAsyncIteration:
                return None

        return following


def _read(call: Any, responses: queue.SimpleQueue[Any]) -> None:
    """Puts the responses of a call into a queue, and then None, or the error that ended it."""
    try:
        for response in call:
            responses.put(response)
        responses.put(None)
    except grpc.RpcError as error:
        responses.put(error)


def _channel(settings: ClientSettings, library: Any) -> Any:
    """Returns a channel. Without `ca_file` it trusts the certificates that come with gRPC, not the system's."""
    if settings.context is None:
        return library.insecure_channel(settings.address, CHANNEL)
    trusted = None if settings.ca_file is None else Path(settings.ca_file).read_bytes()
    return library.secure_channel(settings.address, grpc.ssl_channel_credentials(trusted), CHANNEL)


def _message(backbone: str, request: wire.InferRequest, timeout_us: int | None) -> Any:
    message = messages.ModelInferRequest(model_name=backbone, id=request.id)
    for name, values in request.inputs.items():
        message.inputs.add(name=name, datatype=np_to_triton_dtype(values.dtype), shape=values.shape)
        is_text = values.dtype == object
        message.raw_input_contents.append(serialize_byte_tensor(values).item() if is_text else values.tobytes())
    for name in request.outputs:
        message.outputs.add(name=name)
    for name, value in {**request.parameters, **({} if timeout_us is None else {"timeout": timeout_us})}.items():
        kind = next(kind for own, kind in PARAMETER_FIELDS.items() if isinstance(value, own))
        setattr(message.parameters[name], kind, value)
    return message


def refused(details: str, status: str | None, settings: ClientSettings) -> HplmClientError:
    """Returns the error for gRPC's words about a failed call."""
    if any(words in details for words in NOT_TRUSTED):
        return not_trusted(settings.url, details.rpartition("OPENSSL_internal:")[2])
    if details.startswith(GRPC_NOT_SENT) and NO_HTTP_2 in details:
        return settings.of_another_protocol()
    signs, advice = (GRPC_CUT_OFF, NEEDED) if settings.context is None else (NO_TLS, NOT_SPOKEN)
    is_other = details.startswith(GRPC_NOT_SENT) and any(words in details for words in signs)
    return refusal(f"{details} (gRPC from {settings.url}){advice if is_other else ''}", status)
