"""A request that the model `hplm` forwards to a backbone, and what becomes of the backbone's refusals."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.errors import DeadlineMissed, Draining, Internal, error_in
from hplm.request.answers import OUTPUTS
from hplm.tasks import TASKS


@dataclass(frozen=True)
class Kind:
    """The tensors of encoders or of decoders."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, task: str) -> Kind:
        return DECODER if TASKS[task].generates else ENCODER


ENCODER = Kind(("TEXT", "TEXT_PAIR"), OUTPUTS)
DECODER = Kind(
    (
        *("text_input", "messages", "sampling_parameters", "stream", "exclude_input_in_output"),
        *("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_logprobs"),
    ),
    ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens", "logprobs"),
)


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
    left: int = 1  # every request counts as one

    @property
    def timeout_us(self) -> int:
        """The request's timeout, from its arrival; 0 means no timeout. Raises DeadlineMissed when it is over."""
        if not self.deadline_ns:
            return 0
        if self.deadline_ns <= time.monotonic_ns():
            raise DeadlineMissed.after(self.arrival_ns, self.deadline_ns)
        return (self.deadline_ns - self.arrival_ns) // 1000


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


def refusal(answer: pb_utils.InferenceResponse, model: str) -> pb_utils.InferenceResponse:
    """Returns the error in a backbone's answer as the client gets it.

    Triton does not pass on its code, but the word in its message.
    """
    message = answer.error().message()
    error = error_in(message)
    if error is None and not pb_utils.is_model_ready(model):
        error, message = Draining, Draining(f"backbone {model!r} is being unloaded or loaded: send the request again").wire()
    return replies.failure_with((error or Internal).status, message)
