"""Triton's side of the alias: forwards texts to the encoder that has their tenant, and the answer to the client, unchanged.

Prompts are refused with the name of the tenant's decoder.
Triton has turned forwarded headers into parameters. They go on as parameters: a client could send the same ones itself.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton_python_backend_utils as pb_utils

from backends import replies
from backends.replies import InferenceRequest
from hplm.errors import DeadlineMissed, Draining, Internal, InvalidInput, QueueFull, error_in
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.parameters import request_timeout_us
from hplm.request.answers import Outputs
from hplm.scheduling.limits import Limits
from hplm.scheduling.turns import Turns
from hplm.tasks.tasks import TASKS
from hplm.tenants.arrival import ArrivalClock, Forwarding
from hplm.tenants.directory import Directory
from hplm.tenants.models import has_output
from hplm.threads import repeat

INPUTS = ("TEXT", "TEXT_PAIR")
THREADS = 32  # that forward requests, as many as Triton's own pool for them has; tenants share them
WAITING = Limits(items=1024, work=1024)  # the most requests that wait
SECONDS_BETWEEN_LOOKS = 0.05  # for requests that can no longer be in time
GONE = "the client has closed the connection"
A_WHILE_NS = 10_000_000  # to ask whether the client is still connected is a round trip to the server process


@dataclass(frozen=True, eq=False)
class Forwarded:
    """A request on its way to a backbone. Times are nanoseconds of the monotonic clock."""

    request: pb_utils.InferenceRequest
    sender: replies.Sender
    parameters: dict[str, Any]
    outputs: list[str]  # that the client asked for
    backbone: str
    owner: tuple[str, int]  # the backbone, and the tenant's uid in it
    arrival_ns: int
    deadline_ns: int  # 0: no deadline
    received_ns: int  # when the model `hplm` got it

    @property
    def timeout_us(self) -> int:
        """The request's timeout, from its arrival; 0 means no timeout. Raises DeadlineMissed when it is over."""
        if not self.deadline_ns:
            return 0
        if self.deadline_ns <= time.monotonic_ns():
            raise DeadlineMissed.after(self.arrival_ns, self.deadline_ns)
        return (self.deadline_ns - self.arrival_ns) // 1000


class TritonPythonModel(replies.BackendModel):
    """Requests wait in a line, in which tenants take turns, for its threads."""

    doing = "forwarding the request"

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        self._directory = Directory(self._repository, self._state, copied=True)
        self._directory.follow()
        self._has_output = cache(has_output)
        self._forwarding = Forwarding(os.getppid())
        self._arrivals = ArrivalClock(self._forwarding)
        self._meter = Meter()
        self._publish(self._meter, self._name)
        self._line = Turns[Forwarded](WAITING, 1, time.monotonic_ns, THREADS)
        self._forwarders = [repeat(self._forward_next, f"forward {number}") for number in range(THREADS)]
        self._ending = threading.Event()
        self._expiring = repeat(self._expire, "expire")

    def _well(self, request: InferenceRequest) -> Outputs:
        self._line.check()
        return super()._well(request)

    def _take(self, request: InferenceRequest, given: dict[str, Any], sender: replies.Sender, received_ns: int) -> None:
        backbone, tenant = self._directory.find(given, time.time())
        inputs = replies.inputs_of(request)
        if TASKS[tenant.task].generates:
            raise InvalidInput(
                f"tenant {tenant.id!r} is of decoder {backbone!r}: send text_input or messages to the model {backbone!r}, "
                "by generate, generate_stream or a stream of gRPC"
            )
        if other := inputs.keys() - set(INPUTS):
            raise InvalidInput(
                f"tenant {tenant.id!r} of backbone {backbone!r} does not read {min(other)}: send TEXT or TEXT_PAIR"
            )
        replies.required(inputs, "TEXT")
        outputs = [name for name in request.requested_output_names() if self._has_output(self._repository / backbone, name)]
        timeout_us = request_timeout_us(given, request.timeout())
        arrival_ns = self._arrivals.arrival_ns(given, received_ns)
        deadline_ns = arrival_ns + 1000 * timeout_us if timeout_us else 0
        given |= self._forwarding.parameters(arrival_ns)
        given.setdefault("outputs", ",".join(outputs))
        owner, times = (backbone, tenant.uid), (arrival_ns, deadline_ns, received_ns)
        # Every request counts as one.
        for refused in self._line.enqueue_item(Forwarded(request, sender, given, outputs, backbone, owner, *times), 1):
            full = QueueFull(
                f"{len(self._line)} requests wait to be forwarded, most of them of your tenant: retry after 0.1 s, or ask the "
                "backbone itself"
            )
            self._refuse(refused.sender, full)

    def _count(self, word: str) -> None:
        self._meter.add(names.ALIAS_REQUESTS, 1, word)

    def _refuse_late(self, requests: list[Forwarded]) -> None:
        for late in requests:
            self._refuse(late.sender, DeadlineMissed.after(late.arrival_ns, late.deadline_ns))

    def _forward_next(self) -> bool:
        """Returns False when the model is unloaded."""
        turn = self._line.take()
        if turn is None:
            return False
        taken, expired = turn
        self._refuse_late(expired)
        for forwarded in taken:
            try:
                waited = time.monotonic_ns() - forwarded.received_ns
                cancelled = waited > A_WHILE_NS and forwarded.sender.is_cancelled
                # No client reads the response that ends a cancelled request.
                response = replies.failure_with("CANCELLED", GONE) if cancelled else _forward(forwarded)
                if not cancelled:
                    self._count(names.PASSED_ON)
            except Exception as error:
                self._refuse(forwarded.sender, error)
            else:
                forwarded.sender.send(response)
            finally:
                self._line.done(forwarded)
        return True

    def _expire(self) -> bool:
        """Refuses what is late while the other threads wait for answers. Returns False when the model is unloaded."""
        self._refuse_late(self._line.expired())
        return not self._ending.wait(SECONDS_BETWEEN_LOOKS)

    def finalize(self) -> None:
        """Forwards what waits, and ends the threads."""
        self._line.close()
        for thread in self._forwarders:
            thread.join()
        self._ending.set()
        self._expiring.join()
        super().finalize()
        self._directory.close()


def _forward(forwarded: Forwarded) -> pb_utils.InferenceResponse:
    """Returns the answer of the backbone to a request with the name that the client gave to its own."""
    answer = pb_utils.InferenceRequest(
        request_id=replies.request_id(forwarded.request),
        model_name=forwarded.backbone,
        inputs=forwarded.request.inputs(),
        requested_output_names=forwarded.outputs,
        # Triton does not forward fractions. An encoder has no parameter that is one, so it refuses them as text too.
        parameters={name: str(value) if isinstance(value, float) else value for name, value in forwarded.parameters.items()},
        timeout=forwarded.timeout_us,
    ).exec()
    if answer.has_error():
        return refusal(answer, forwarded.backbone, forwarded.sender.resends)
    return pb_utils.InferenceResponse(answer.output_tensors())  # already in shared memory


def refusal(answer: pb_utils.InferenceResponse, model: str, resends: bool = False) -> pb_utils.InferenceResponse:
    """Returns the error in a backbone's answer as the client gets it.

    Triton does not pass on its code, but the word in its message.
    """
    message = answer.error().message()
    error = error_in(message)
    if error is None and not pb_utils.is_model_ready(model):
        error, message = Draining, Draining(f"backbone {model!r} is being unloaded or loaded: send the request again").wire()
    return replies.failure_with((error or Internal).status_for(resends), message)
