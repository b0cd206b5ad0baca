"""gRPC for threads: any number of threads share one channel with one HTTP/2 connection."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import tritonclient.grpc
from tritonclient.grpc import InferResult
from tritonclient.utils import InferenceServerException

from hplm_client.errors import GRPC_CUT_OFF, GRPC_NOT_SENT, ClientTimeout, HplmClientError, refusal
from hplm_client.generation import Outputs, Prompt, listed, tensors_of
from hplm_client.settings import Settings
from hplm_client.tls import NEEDED, NOT_SPOKEN, not_trusted

# This list replaces tritonclient's own, so its message sizes (no limit) are repeated. By default gRPC waits a second after a
# refused connection, and fails all calls in between without trying. So the first wait is shorter here.
CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
LATEST_REPORT_S = 5.0  # from the end of a stream to its error, which another thread reports
# gRPC reports failures of TLS by text only.
NOT_TRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed", "is not in peer certificate")
NO_TLS = ("andshake", "ALPN")


class GrpcTransport:
    library = tritonclient.grpc

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._address = {"url": settings.address, "creds": credentials(settings), "channel_args": CHANNEL}
        self._client = tritonclient.grpc.InferenceServerClient(**self._address)

    def infer(self, backbone: str, arguments: dict[str, Any], seconds: float) -> InferResult:
        return self._call(self._client.infer, seconds, model_name=backbone, **arguments)

    def generate(self, backbone: str, prompt: Prompt, timeout_us: int | None, seconds: float) -> Generator[Outputs]:
        """Yields responses. `seconds` limit the wait for each. To close the generator cancels the request.

        tritonclient has one stream for each client. Clients of one address share their connection, if it has no TLS.
        """
        responses: queue.SimpleQueue[InferResult | InferenceServerException] = queue.SimpleQueue()
        client = tritonclient.grpc.InferenceServerClient(**self._address)
        try:
            client.start_stream(
                lambda result, error: responses.put(error or result), headers=self._settings.headers_for(prompt.parameters())
            )
            try:
                client.async_stream_infer(
                    backbone,
                    tensors_of(prompt.inputs(), self.library, [1]),
                    timeout=timeout_us,
                    parameters=prompt.parameters(),
                    enable_empty_final_response=True,
                )
            except InferenceServerException as error:  # the stream has failed already, and its own error says why
                raise failure(_reported(responses) or error, self._settings, seconds) from error
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
        if not self._call(self._client.is_server_ready, seconds):
            return False
        if backbone is None:
            return True
        try:
            return self._call(self._client.is_model_ready, seconds, model_name=backbone)
        except HplmClientError as error:
            return tells_no_more(error)

    def statistics(self, seconds: float) -> dict[str, Any]:
        return self._call(self._client.get_inference_statistics, seconds, as_json=True)

    def close(self) -> None:
        self._client.close()

    def _call(self, method: Callable[..., Any], seconds: float, **arguments: Any) -> Any:
        try:
            headers = self._settings.headers_for(arguments.get("parameters", {}))
            return method(headers=headers, client_timeout=seconds, **arguments)
        except InferenceServerException as error:
            raise failure(error, self._settings, seconds) from error


def _reported(responses: queue.SimpleQueue[InferResult | InferenceServerException]) -> InferenceServerException | None:
    """Returns the error of a stream, or None if none comes."""
    with suppress(queue.Empty):
        reported = responses.get(timeout=LATEST_REPORT_S)
        return reported if isinstance(reported, InferenceServerException) else None
    return None


def failure(error: InferenceServerException, settings: Settings, seconds: float) -> HplmClientError:
    """Turns an error of tritonclient's gRPC clients into one of ours."""
    if error.status() == "StatusCode.DEADLINE_EXCEEDED":
        return ClientTimeout(f"no answer from {settings.url} within {seconds:.3g} s", error.status())
    return refused(error.message(), error.status(), settings)


def refused(details: str, status: str | None, settings: Settings) -> HplmClientError:
    """Returns the error for gRPC's words about a failed call."""
    if any(words in details for words in NOT_TRUSTED):
        return not_trusted(settings.url, details.rpartition("OPENSSL_internal:")[2])
    signs, advice = (GRPC_CUT_OFF, NEEDED) if settings.context is None else (NO_TLS, NOT_SPOKEN)
    is_other = details.startswith(GRPC_NOT_SENT) and any(words in details for words in signs)
    return refusal(f"{details} (gRPC from {settings.url}){advice if is_other else ''}", status)


def tells_no_more(error: HplmClientError) -> bool:
    """Whether this is the front door's answer to a question about a model's state. Raises other errors."""
    if error.status == "StatusCode.UNIMPLEMENTED":
        return True
    raise error


def credentials(settings: Settings) -> grpc.ChannelCredentials | None:
    """Returns the trusted certificates; None for connections without TLS. gRPC has a list of its own, not the system's."""
    if settings.context is None:
        return None
    return grpc.ssl_channel_credentials(None if settings.ca_file is None else Path(settings.ca_file).read_bytes())
