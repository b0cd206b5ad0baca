"""gRPC for threads: any number of threads share one channel with one HTTP/2 connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tritonclient.grpc
from tritonclient.grpc import InferResult
from tritonclient.utils import InferenceServerException

from hplm_client.errors import ClientTimeout, HplmClientError, refusal
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


def failure(error: InferenceServerException, settings: Settings, seconds: float) -> HplmClientError:
    """Turns an error of tritonclient's gRPC clients into one of ours."""
    if error.status() == "StatusCode.DEADLINE_EXCEEDED":
        return ClientTimeout(f"no answer from {settings.url} within {seconds:.3g} s", error.status())
    return refusal(f"{error.message()} (gRPC from {settings.url})", error.status())
