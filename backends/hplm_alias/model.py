"""Triton's side of the alias: forwards a request to its tenant's backbone, and the answer to the client, unchanged.

Encoders and decoders take other tensors and give other ones. The alias has all of them, and forwards those of the tenant's
backbone. An answer of a decoder is whole, because a model whose answers may be streams takes no plain requests.
Triton has turned forwarded headers into parameters. They go on as parameters: a client could send the same ones itself.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backends import replies
from backends.replies import Request
from hplm.errors import DeadlineMissed, Draining, Internal, InvalidInput, QueueFull, error_in
from hplm.generation.sampling import SETTINGS
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.parameters import asked_timeout_us
from hplm.request.answers import OUTPUTS, Outputs
from hplm.scheduling.limits import Limits
from hplm.scheduling.turns import Turns
from hplm.tasks import TASKS
from hplm.tenants.arrival import CANCEL, PROMPT, Arrivals, Mark
from hplm.tenants.directory import Directory
from hplm.threads import repeat

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Kind:
    """The tensors of encoders or of decoders."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    threads: int  # that forward them. Triton's own pool for such requests has 32; answers to prompts take long
    places: int  # that tenants share; 0: any tenant may have all threads


ENCODER = Kind(("TEXT", "TEXT_PAIR"), OUTPUTS, threads=32, places=32)
DECODER = Kind(
    (
        *("text_input", "messages", "sampling_parameters", "stream", "exclude_input_in_output"),
        *("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_logprobs"),
    ),
    ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens", "logprobs"),
    threads=16,
    places=0,
)
WAITING = Limits(items=1024, work=1024)  # the most requests of a kind that wait
SECONDS_BETWEEN_LOOKS = 0.05  # for requests that can no longer be in time, and for clients that have gone
GONE = "the client has closed the connection"
A_WHILE_NS = 10_000_000  # to ask whether the client is still connected is a round trip to the server process


@dataclass(frozen=True, eq=False)
class Forwarded:
    """A request on its way to a backbone. Times are nanoseconds of the monotonic clock."""

    request: pb_utils.InferenceRequest
    sender: replies.Sender
    parameters: dict[str, Any]
    kind: Kind
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


class TritonPythonModel(replies.Model):
    """Requests for encoders and those for decoders wait in a line each, in which tenants take turns, for its threads."""

    doing = "forwarding the request"

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        self._directory = Directory(self._repository, self._state, copied=True)
        self._directory.follow()
        self._mark = Mark(os.getppid())
        self._arrivals = Arrivals(self._mark)
        self._meter = Meter()
        self._publish(self._meter, self._name)
        self._prompts: dict[str, Forwarded] = {}  # that a decoder answers now, by their names
        self._lines = {kind: Turns[Forwarded](WAITING, 1, time.monotonic_ns, kind.places) for kind in (ENCODER, DECODER)}
        self._forwarding = [
            repeat(partial(self._forward_next, line), f"forward {number}")
            for kind, line in self._lines.items()
            for number in range(kind.threads)
        ]
        self._ending = threading.Event()
        self._looking = [repeat(self._expire, "expire"), repeat(self._cancel_unwanted, "cancelled")]

    def _well(self, request: Request) -> Outputs:
        for line in self._lines.values():
            line.check()
        return super()._well(request)

    def _take(self, request: Request, given: dict[str, Any], sender: replies.Sender, received_ns: int) -> None:
        backbone, tenant = self._directory.find(given, time.time())
        kind = DECODER if TASKS[tenant.task].generates else ENCODER
        _check(request, kind, tenant.id, backbone)
        outputs = [name for name in request.requested_output_names() if name in kind.outputs]
        if not outputs:
            raise InvalidInput(f"tenant {tenant.id!r} answers with {', '.join(kind.outputs)}: request some of these outputs")
        timeout_us = asked_timeout_us(given, request.timeout())
        arrival_ns = self._arrivals.arrival_ns(given, received_ns)
        deadline_ns = arrival_ns + 1000 * timeout_us if timeout_us else 0
        for name in (PROMPT, CANCEL):
            given.pop(name, None)  # only we may say it
        given |= self._mark.parameters(arrival_ns)
        if kind is ENCODER:
            given.setdefault("outputs", ",".join(outputs))
        owner, times, line = (backbone, tenant.uid), (arrival_ns, deadline_ns, received_ns), self._lines[kind]
        # Every request counts as one.
        for refused in line.join(Forwarded(request, sender, given, kind, outputs, backbone, owner, *times), 1):
            full = QueueFull(
                f"{len(line)} requests wait to be forwarded, most of them of your tenant: retry after 0.1 s, or ask the "
                "backbone itself"
            )
            self._refuse(refused.sender, full)

    def _count(self, word: str) -> None:
        self._meter.add(names.ALIAS_REQUESTS, 1, word)

    def _refuse_late(self, requests: list[Forwarded]) -> None:
        for late in requests:
            self._refuse(late.sender, DeadlineMissed.after(late.arrival_ns, late.deadline_ns))

    def _forward_next(self, line: Turns[Forwarded]) -> bool:
        """Returns False when the model is unloaded."""
        turn = line.take()
        if turn is None:
            return False
        taken, expired = turn
        self._refuse_late(expired)
        for forwarded in taken:
            try:
                waited = time.monotonic_ns() - forwarded.received_ns
                cancelled = waited > A_WHILE_NS and forwarded.sender.is_cancelled
                # No client reads the response that ends a cancelled request.
                response = replies.failure_with("CANCELLED", GONE) if cancelled else self._answer(forwarded)
            except Exception as error:
                self._refuse(forwarded.sender, error)
            else:
                forwarded.sender.send(response)
            finally:
                if forwarded.kind.places:
                    line.done(forwarded)
        return True

    def _answer(self, forwarded: Forwarded) -> pb_utils.InferenceResponse:
        """Returns the answer of the backbone."""
        name = secrets.token_hex(8) if forwarded.kind is DECODER else ""
        if name:
            forwarded.parameters[PROMPT] = name
            self._prompts[name] = forwarded
        try:
            response = _forward(forwarded)
        finally:
            self._prompts.pop(name, None)
        self._count(names.PASSED_ON)
        return response

    def _expire(self) -> bool:
        """Refuses what is late while the other threads wait for long answers. Returns False when the model is unloaded."""
        for line in self._lines.values():
            self._refuse_late(line.expired())
        return not self._ending.wait(SECONDS_BETWEEN_LOOKS)

    def _cancel_unwanted(self) -> bool:
        """Cancels prompts whose clients have gone: Triton does not tell decoders. Returns False when the model is unloaded."""
        for name, forwarded in list(self._prompts.items()):
            try:
                if forwarded.sender.is_cancelled:
                    given = {**self._mark.parameters(forwarded.arrival_ns), CANCEL: name}
                    none = [pb_utils.Tensor("text_input", np.array([b""], dtype=object))]
                    _only_response(ask(forwarded, none, ["text_output"], given, 0))
            except Exception:  # the places of others must still be freed
                log.exception("cannot cancel a prompt")
        return not self._ending.wait(SECONDS_BETWEEN_LOOKS)

    def finalize(self) -> None:
        """Forwards what waits, and ends the threads."""
        for line in self._lines.values():
            line.close()
        for thread in self._forwarding:
            thread.join()
        self._ending.set()
        for thread in self._looking:
            thread.join()
        super().finalize()
        self._directory.close()


def _check(request: pb_utils.InferenceRequest, kind: Kind, tenant: str, backbone: str) -> None:
    """Raises if the tenant's backbone does not take these inputs. To Triton all of the alias's inputs are optional."""
    inputs = replies.inputs_of(request)
    for name, given in inputs.items():
        if name not in kind.inputs:
            wanted = " or ".join(kind.inputs[:2])
            raise InvalidInput(f"tenant {tenant!r} of backbone {backbone!r} does not read {name}: send {wanted}")
        if kind is DECODER and (values := given.as_numpy().size) != 1:
            raise InvalidInput(f"{name} has {values} values, but a request has one prompt: send one each")
    if kind is ENCODER:
        replies.required(inputs, "TEXT")
    elif replies.flag(inputs, "stream"):
        raise InvalidInput(f"the model 'hplm' answers whole: send requests with 'stream' to backbone {backbone!r}")


def _forward(forwarded: Forwarded) -> pb_utils.InferenceResponse:
    inputs, parameters, is_prompt = forwarded.request.inputs(), forwarded.parameters, forwarded.kind is DECODER
    if is_prompt:
        inputs, parameters = _prompt(inputs, parameters)
    call = ask(forwarded, inputs, forwarded.outputs, parameters, forwarded.timeout_us)
    answer = _only_response(call) if is_prompt else call.exec()
    if answer.has_error():
        return refusal(answer, forwarded.backbone, forwarded.sender.resends)
    tensors = answer.output_tensors()  # already in shared memory
    if is_prompt:
        tensors = [pb_utils.Tensor(one.name(), one.as_numpy().reshape(1, -1)) for one in tensors]
    return pb_utils.InferenceResponse(tensors)


def _prompt(inputs: list[pb_utils.Tensor], parameters: dict[str, Any]) -> tuple[list[pb_utils.Tensor], dict[str, Any]]:
    """Returns inputs and parameters as a decoder takes them: without a batch, and with the settings of sampling in JSON."""
    own = [pb_utils.Tensor(one.name(), one.as_numpy().reshape(-1)) for one in inputs]
    settings = {name: value for name, value in parameters.items() if name in SETTINGS}
    if not settings or any(one.name() == "sampling_parameters" for one in inputs):
        return own, parameters
    own.append(pb_utils.Tensor("sampling_parameters", np.array([json.dumps(settings).encode()], dtype=object)))
    return own, {name: value for name, value in parameters.items() if name not in settings}


def _only_response(call: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    """Returns the answer of a decoupled model. Triton may end it with an empty response."""
    responses = [one for one in call.exec(decoupled=True) if one.has_error() or one.output_tensors()]
    if not responses:
        raise InvalidInput("the answer has none of the requested outputs: request text_output")
    return responses[0]


def ask(
    forwarded: Forwarded,
    inputs: list[pb_utils.Tensor],
    outputs: list[str],
    parameters: dict[str, Any],
    timeout_us: int,
) -> pb_utils.InferenceRequest:
    """Returns a request to the backbone, with the name that the client gave to its own."""
    return pb_utils.InferenceRequest(
        request_id=replies.request_id(forwarded.request),
        model_name=forwarded.backbone,
        inputs=inputs,
        requested_output_names=outputs,
        # Triton does not forward fractions. An encoder has no parameter that is one, so it refuses them as text too. A decoder
        # reads text for milliseconds; settings of sampling are an input by now.
        parameters={name: str(value) if isinstance(value, float) else value for name, value in parameters.items()},
        timeout=timeout_us,
    )


def refusal(answer: pb_utils.InferenceResponse, model: str, resends: bool = False) -> pb_utils.InferenceResponse:
    """Returns the error in a backbone's answer as the client gets it.

    Triton does not pass on its code, but the word in its message.
    """
    message = answer.error().message()
    error = error_in(message)
    if error is None and not pb_utils.is_model_ready(model):
        error, message = Draining, Draining(f"backbone {model!r} is being unloaded or loaded: send the request again").wire()
    return replies.failure_with((error or Internal).status_for(resends), message)
