"""Triton's side of the alias: forwards a request to its tenant's backbone, and the answer to the client, unchanged.

Triton has turned forwarded headers into parameters. They go on as parameters: a client could send the same ones itself.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.errors import Broken, DeadlineMissed, Draining, QueueFull, error_in
from hplm.tenants.directory import Directory

AT_ONCE = 32  # as many threads as Triton's own pool for such requests
WAITING = 1024
A_WHILE = 0.01  # seconds; to ask whether the client is still connected is a round trip to the server process


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        self._directory = Directory(Path(args["model_repository"]).parent, replies.state_folder())
        self._capacity = threading.BoundedSemaphore(AT_ONCE + WAITING)
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="forward")

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[None]:
        """Takes the requests and returns at once. Each is answered once, later, through its own sender."""
        arrival = time.monotonic()
        for request in requests:
            sender = request.get_response_sender()
            if self._capacity.acquire(blocking=False):
                self._pool.submit(self._serve, request, sender, arrival)
            else:
                full = QueueFull(
                    f"{WAITING} requests are waiting to be forwarded: retry after 0.1 s, or ask the backbone itself"
                )
                replies.send(sender, replies.failure(full))
        return [None] * len(requests)

    def _serve(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender, arrival: float) -> None:
        try:
            if time.monotonic() - arrival > A_WHILE and request.is_cancelled():
                response = _cancelled()
            else:
                response = self._forward(request, arrival)
        except Exception as error:
            response = replies.failure(error, "forwarding the request")
        finally:
            self._capacity.release()
        replies.send(sender, response)

    def _forward(self, request: pb_utils.InferenceRequest, arrival: float) -> pb_utils.InferenceResponse:
        parameters = replies.request_parameters(request)
        backbone, _ = self._directory.find(parameters, time.time())
        answer = pb_utils.InferenceRequest(
            request_id=replies.request_id(request),
            model_name=backbone,
            inputs=request.inputs(),
            requested_output_names=list(request.requested_output_names()),
            # Triton does not forward fractions. No parameter of the backbone is a fraction, so it refuses them as text too.
            parameters={name: str(value) if isinstance(value, float) else value for name, value in parameters.items()},
            timeout=_left(request.timeout(), arrival),
        ).exec()
        if not answer.has_error():
            return pb_utils.InferenceResponse(answer.output_tensors())  # already in shared memory
        message = answer.error().message()  # Triton does not pass on the error's code
        known = error_in(message)
        if known is None and not pb_utils.is_model_ready(backbone):
            raise Draining(f"backbone {backbone!r} is being unloaded or loaded: send the request again")
        return replies.failure_with((known or Broken).status, message)

    def finalize(self) -> None:
        self._pool.shutdown(wait=True)


def _left(timeout_us: int, arrival: float) -> int:
    """Returns the rest of the request's timeout; 0 means no timeout."""
    if not timeout_us:
        return 0
    left = timeout_us - round((time.monotonic() - arrival) * 1e6)
    if left <= 0:
        raise DeadlineMissed(
            f"the request was not started within the {timeout_us / 1000:g} ms that it allowed: allow more time"
        )
    return left


def _cancelled() -> pb_utils.InferenceResponse:
    """Returns a response that ends the request. No client reads it."""
    return replies.failure_with("CANCELLED", "the client has closed the connection")
