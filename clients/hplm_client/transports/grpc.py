"""gRPC for threads: any number of threads share one channel with one HTTP/2 connection."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import tritonclient.grpc
from tritonclient.grpc import InferInput, InferResult
from tritonclient.utils import InferenceServerException

from hplm_client.errors import ClientTimeout, HplmClientError, refusal
from hplm_client.generation import Outputs, Prompt
from hplm_client.settings import Settings

# This list replaces tritonclient's own, so its message sizes (no limit) are repeated. By default gRPC waits a second after a
# refused connection, and fails all calls in between without trying. So the first wait is shorter here.
CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class GrpcTransport:
    library = tritonclient.grpc

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = tritonclient.grpc.InferenceServerClient(settings.url, channel_args=CHANNEL)

    def infer(self, backbone: str, arguments: dict[str, Any], seconds: float) -> InferResult:
        return self._call(self._client.infer, seconds, model_name=backbone, **arguments)

    def generate(self, backbone: str, prompt: Prompt, timeout_us: int | None, seconds: float) -> Generator[Outputs]:
        """Yields responses. `seconds` limit the wait for each. To close the generator cancels the request.

        tritonclient has one stream for each client. Clients of one address share their connection.
        """
        responses: queue.SimpleQueue[InferResult | InferenceServerException] = queue.SimpleQueue()
        client = tritonclient.grpc.InferenceServerClient(self._settings.url, channel_args=CHANNEL)
        try:
            client.start_stream(lambda result, error: responses.put(error or result), headers=self._settings.headers)
            client.async_stream_infer(
                backbone,
                [one_value(name, value) for name, value in prompt.inputs().items()],
                timeout=timeout_us,
                parameters=prompt.parameters(),
                enable_empty_final_response=True,
            )
            is_last = False
            while not is_last:
                try:
                    result = responses.get(timeout=seconds)
                except queue.Empty:
                    raise ClientTimeout(f"no answer from {self._settings.url} within {seconds:.3g} s") from None
                if isinstance(result, InferenceServerException):
                    raise failure(result, self._settings, seconds)
                response: Any = result.get_response()
                is_last = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield {output.name: listed(result, output.name) for output in response.outputs}
        finally:
            client.stop_stream(cancel_requests=True)
            client.close()

    def metadata(self, model: str, seconds: float) -> dict[str, Any]:
        return self._call(self._client.get_model_metadata, seconds, model_name=model, as_json=True)

    def ready(self, backbone: str | None, seconds: float) -> bool:
        return self._call(self._client.is_server_ready, seconds) and (
            backbone is None or self._call(self._client.is_model_ready, seconds, model_name=backbone)
        )

    def statistics(self, seconds: float) -> dict[str, Any]:
        return self._call(self._client.get_inference_statistics, seconds, as_json=True)

    def close(self) -> None:
        self._client.close()

    def _call(self, method: Callable[..., Any], seconds: float, **arguments: Any) -> Any:
        try:
            return method(headers=self._settings.headers, client_timeout=seconds, **arguments)
        except InferenceServerException as error:
            raise failure(error, self._settings, seconds) from error


def one_value(name: str, value: str | bool) -> InferInput:
    """Makes an input of one value."""
    tensor = InferInput(name, [1], "BOOL" if isinstance(value, bool) else "BYTES")
    values = np.empty(1, dtype=bool if isinstance(value, bool) else np.object_)
    values[0] = value if isinstance(value, bool) else value.encode()
    tensor.set_data_from_numpy(values)
    return tensor


def listed(result: InferResult, name: str) -> list[Any]:
    values: Any = result.as_numpy(name)
    return [value.decode() if isinstance(value, bytes) else value for value in values.tolist()]


def failure(error: InferenceServerException, settings: Settings, seconds: float) -> HplmClientError:
    """Turns an error of tritonclient's gRPC clients into one of ours."""
    if error.status() == "StatusCode.DEADLINE_EXCEEDED":
        return ClientTimeout(f"no answer from {settings.url} within {seconds:.3g} s", error.status())
    return refusal(f"{error.message()} (gRPC from {settings.url})", error.status())
