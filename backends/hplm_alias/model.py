"""Triton's side of the alias: forwards a request to its tenant's backbone, and the answer to the client, unchanged.

Triton has turned forwarded headers into parameters. They go on as parameters: a client could send the same ones itself.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.engine.threads import repeat
from hplm.errors import Broken, DeadlineMissed, Draining, QueueFull, error_in
from hplm.scheduling.turns import Bounds, Turns
from hplm.server.held import Held
from hplm.tenants.directory import Directory

AT_ONCE = 32  # as many threads as Triton's own pool for such requests
WAITING = Bounds(items=1024, work=1024)  # the most requests that wait
A_WHILE_NS = 10_000_000  # to ask whether the client is still connected is a round trip to the server process


@dataclass(frozen=True, eq=False)
class Forwarded:
    """A request on its way to a backbone. Times are nanoseconds of the monotonic clock."""

    request: pb_utils.InferenceRequest
    sender: replies.Sender
    parameters: dict[str, Any]
    backbone: str
    tenant: tuple[str, int]  # the backbone and the tenant's uid in it
    arrival_ns: int
    deadline_ns: int  # 0: no deadline
    left: int = 1  # every request counts as one


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        self._directory = Directory(Path(args["model_repository"]).parent, replies.state_folder())
        self._held = Held(args["model_name"])
        self._line: Turns[Forwarded] = Turns(WAITING, 1, time.monotonic_ns)
        self._threads = [repeat(self._forward_next, f"forward {number}") for number in range(AT_ONCE)]

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[None]:
        """Takes the requests and returns at once. Each is answered once, later, through its own sender."""
        arrival = time.monotonic_ns()
        for request in requests:
            sender = replies.Sender(request, self._held)
            try:
                self._take(request, sender, arrival)
            except Exception as error:
                sender.send(replies.failure(error, "forwarding the request"))
        return [None] * len(requests)

    def _take(self, request: pb_utils.InferenceRequest, sender: replies.Sender, arrival_ns: int) -> None:
        replies.refuse_while_draining()
        parameters = replies.request_parameters(request)
        if replies.is_probe(parameters):
            replies.send_outputs(sender, replies.answer_to_probe(request.requested_output_names()))
            return
        backbone, tenant = self._directory.find(parameters, time.time())
        replies.required(request, "TEXT")  # Triton only counts inputs, and the pair may be one
        deadline_ns = arrival_ns + 1000 * request.timeout() if request.timeout() else 0
        for refused in self._line.offer(
            Forwarded(request, sender, parameters, backbone, (backbone, tenant.uid), arrival_ns, deadline_ns)
        ):
            full = QueueFull(
                f"{len(self._line)} requests wait to be forwarded, most of them of your tenant: retry after 0.1 s, or ask the "
                "backbone itself"
            )
            refused.sender.send(replies.failure(full))

    def _forward_next(self) -> bool:
        """Returns False when the model is unloaded."""
        turn = self._line.take()
        if turn is None:
            return False
        taken, expired = turn
        for late in expired:
            late.sender.send(replies.failure(DeadlineMissed.after(late.arrival_ns, late.deadline_ns)))
        for forwarded in taken:
            try:
                waited = time.monotonic_ns() - forwarded.arrival_ns
                cancelled = waited > A_WHILE_NS and forwarded.request.is_cancelled()
                response = _cancelled() if cancelled else _forward(forwarded)
            except Exception as error:
                response = replies.failure(error, "forwarding the request")
            forwarded.sender.send(response)
        return True

    def finalize(self) -> None:
        self._line.close()
        for thread in self._threads:
            thread.join()
        self._held.close()


def _forward(forwarded: Forwarded) -> pb_utils.InferenceResponse:
    request, backbone = forwarded.request, forwarded.backbone
    answer = pb_utils.InferenceRequest(
        request_id=replies.request_id(request),
        model_name=backbone,
        inputs=request.inputs(),
        requested_output_names=list(request.requested_output_names()),
        # Triton does not forward fractions. No parameter of the backbone is a fraction, so it refuses them as text too.
        parameters={name: str(value) if isinstance(value, float) else value for name, value in forwarded.parameters.items()},
        timeout=_left_us(forwarded),
    ).exec()
    if not answer.has_error():
        return pb_utils.InferenceResponse(answer.output_tensors())  # already in shared memory
    message = answer.error().message()  # Triton does not pass on the error's code
    known = error_in(message)
    if known is None and not pb_utils.is_model_ready(backbone):
        raise Draining(f"backbone {backbone!r} is being unloaded or loaded: send the request again")
    return replies.failure_with((known or Broken).status, message)


def _left_us(forwarded: Forwarded) -> int:
    """Returns the rest of the request's timeout; 0 means no timeout."""
    if not forwarded.deadline_ns:
        return 0
    left = (forwarded.deadline_ns - time.monotonic_ns()) // 1000
    if left <= 0:
        raise DeadlineMissed.after(forwarded.arrival_ns, forwarded.deadline_ns)
    return left


def _cancelled() -> pb_utils.InferenceResponse:
    """Returns a response that ends the request. No client reads it."""
    return replies.failure_with("CANCELLED", "the client has closed the connection")
