"""Reads the tensors and parameters of requests, and sends their answers, for all our Python models."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from hplm.errors import RESEND, Draining, HplmError, InvalidInput, OutOfCapacity, for_client, logged_error, word_of
from hplm.location import location_of
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.metrics.publisher import Publisher
from hplm.request.answers import LARGE, Outputs, SharedMemory, deserialized, outputs_of, serialized, size_of
from hplm.server.control import REVIVED
from hplm.server.held import Held
from hplm.server.inherited import Drain
from hplm.server.log import begin_log
from hplm.server.probing import PROBE
from hplm.tasks.answers import EMBEDDING, TextAnswer
from hplm.tenants.authorize import check_header
from hplm.threads import Threads

# The stub looks them up there for each tensor of strings. Its own take more than twice as long.
pb_utils.serialize_byte_tensor, pb_utils.deserialize_bytes_tensor = serialized, deserialized
begin_log()
log = logging.getLogger(__name__)
SHARED_MEMORY = SharedMemory()
DRAIN = Drain()
InferenceRequest: TypeAlias = "pb_utils.InferenceRequest"
Inputs: TypeAlias = "dict[str, pb_utils.Tensor]"  # by name


def saying(text: str, request: InferenceRequest) -> Outputs:
    """Returns an answer that only says something of ours, as a label."""
    answer = TextAnswer([text], np.zeros(1, np.float32), np.zeros((1, 1), np.float32), np.zeros((1, 2), np.int32))
    return outputs_of([answer], set(request.requested_output_names()) - {EMBEDDING}, [0])


class Sender:
    """Sends the responses to a request that the model holds. Only decoupled models may send more than one.

    `execute` returns the response if it comes before `defer`. That saves a round trip to the server process.

    Triton forgets a request when its last response is sent, and to ask about it after that ends the whole server process. So
    only one thread at a time talks to Triton about a request.
    """

    __slots__ = ("_ended", "_has_room", "_held", "_request", "_response", "_sender", "_talking", "is_probe", "resends")

    def __init__(self, request: InferenceRequest, held: Held, has_room: Callable[[int], bool] | None = None) -> None:
        """`held` has counted the request. `has_room`: whether a response of a size may be returned; None: all are deferred."""
        self._request: InferenceRequest | None = request
        self._has_room = has_room
        self._sender: pb_utils.InferenceResponseSender | None = None
        self._response: pb_utils.InferenceResponse | None = None  # that is returned
        self._held = held
        self.is_probe = self.resends = False
        self._ended = False
        if has_room is None:
            self.defer()

    def take_for_probe(self) -> None:
        """Says that the request is only a probe."""
        self.is_probe = True
        self._held.forget()

    def defer(self) -> None:
        """Lets any thread answer from now on. Before, only the thread that Triton has called may do so."""
        if self._request is not None:
            self._talking = threading.Lock()
            self._sender, self._request = self._request.get_response_sender(), None

    @property
    def is_deferred(self) -> bool:
        return self._sender is not None

    def returned(self) -> pb_utils.InferenceResponse | None:
        """Gives up the response to be returned, and the request."""
        response, self._response, self._request, self._has_room = self._response, None, None, None
        return response

    def send_answer(self, answer: Outputs | HplmError, is_last: bool = True) -> HplmError | None:
        """Sends the answer to a request, or a part of it. Returns the error that was sent instead, and is its end."""
        if isinstance(answer, HplmError):
            self.send(failure(answer, resends=self.resends))
            return None
        try:
            # Not through numpy's DLPack: this stub takes a used capsule for a fresh one.
            response = pb_utils.InferenceResponse([pb_utils.Tensor(name, values) for name, values in answer.items()])
            size = size_of(answer)
        except Exception as error:
            self.send(failure(error, "making the answer"))
            return for_client(error, "making the answer")
        if self._sender is None and self._has_room is not None and not self._has_room(size):
            self.defer()
        if size < LARGE:
            self.send(response, is_last)
            return None
        try:
            with SHARED_MEMORY.taken(size):
                self.send(response, is_last)
        except OutOfCapacity as error:  # nothing was sent
            log.error("%s", error)
            self.send(failure(error))
            return error
        return None

    def send(self, response: pb_utils.InferenceResponse, is_last: bool = True) -> None:
        if self._sender is None:
            self._response = response
            return
        try:
            with self._talking:
                self._ended |= is_last
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0)
        finally:
            if is_last and not self.is_probe:
                self._held.answered()

    @property
    def is_cancelled(self) -> bool:
        """Whether the client has gone before the last response. To ask is a round trip to the server process."""
        if self._sender is None:
            return False
        with self._talking:
            return not self._ended and self._sender.is_cancelled()


class BackendModel:
    """A model of ours. Each says how it takes a request and what it answers to a probe; the rest is alike."""

    doing = "taking the request"  # what has failed, for exceptions that nobody expected
    defers = True  # whether all answers are sent later, through the requests' senders

    def initialize(self, args: dict[str, str]) -> None:
        given = json.loads(args["model_config"])["parameters"]
        self._name, self._parameters = args["model_name"], {name: own["string_value"] for name, own in given.items()}
        self._repository = Path(args["model_repository"]).parent
        state = os.environ.get("HPLM_STATE")
        self._state = location_of(state) if state else None  # the registry that the server was started with
        self._publishers: list[Publisher] = []
        self._refusing = Threads[tuple[Sender, pb_utils.InferenceResponse]](lambda one: one[0].send(one[1]), "refusals")
        self._held = Held(self._name)

    @property
    def _folder(self) -> Path:
        """The exported version of its backbone."""
        return self._repository / self._parameters["backbone"] / "1"

    def _publish(self, meter: Meter, backbone: str) -> None:
        meter.add(names.MODEL_RESTARTS, int(self._parameters.get(REVIVED, "0")), self._name)
        self._publishers.append(Publisher(pb_utils.MetricFamily, meter, backbone))

    def execute(self, requests: list[InferenceRequest]) -> list[pb_utils.InferenceResponse | None] | None:
        """Takes requests. Each is answered once: its response is returned, or sent later through its sender."""
        received_ns, accepted = time.monotonic_ns(), list[Any]()
        self._held.take(len(requests))
        self._room = LARGE - 1  # bytes for which the process surely has the shared memory, all responses together
        senders = [Sender(request, self._held, None if self.defers else self._has_room) for request in requests]
        for request, sender in zip(requests, senders, strict=True):
            try:
                given = self._read(request, sender)
                if sender.is_probe:
                    sender.send_answer(self._well(request))
                elif (taken := self._take(request, given, sender, received_ns)) is not None:
                    accepted.append(taken)
            except Exception as error:
                self._refuse(sender, error)
        self._submit(accepted)
        responses = [sender.returned() for sender in senders]
        both = zip(senders, responses, strict=True)
        if returned := sum([response is not None and not sender.is_probe for sender, response in both]):
            self._held.answered(returned)
        return responses

    def _has_room(self, size: int) -> bool:
        """Whether a response of `size` bytes may be returned with the others."""
        if size > self._room:
            return False
        self._room -= size
        return True

    def finalize(self) -> None:
        """Returns when all refusals have been sent."""
        self._refusing.close()
        for publisher in self._publishers:
            publisher.close()
        self._held.close()

    def _read(self, request: InferenceRequest, sender: Sender) -> Any:
        """Returns the parameters and forwarded headers of a request, as the client sent them. Raises while the server drains.

        Lets `sender` know if the request only asks whether the model works.
        """
        try:
            given = request.parameters() or "{}"
        except UnicodeDecodeError:  # it holds all parameters, API keys too
            raise InvalidInput("a parameter or header of the request is not UTF-8: send UTF-8") from None
        check_header(given)
        try:
            parameters: dict[str, Any] = msgspec.json.decode(given)
        except msgspec.DecodeError:  # JSON has no NaN, of which Triton makes one
            parameters = json.loads(given)
        if parameters.get(PROBE) is True:
            sender.take_for_probe()
        sender.resends = RESEND in parameters
        if DRAIN.begun or (sender.is_probe and DRAIN.leaving):
            raise Draining("the server is being stopped: send the request to another one, or again in a few seconds")
        return parameters

    def _well(self, request: InferenceRequest) -> Outputs:
        """Returns the answer to a probe, or raises."""
        return saying("ok", request)

    def _take(self, request: InferenceRequest, given: Any, sender: Sender, received_ns: int) -> Any:
        """Returns what `_submit` gets of a request, or raises. Returns None for one that is answered already, or kept."""
        raise NotImplementedError

    def _submit(self, accepted: list[Any]) -> None:
        """Passes on what was taken in a call."""

    def _count(self, word: str, /) -> None:
        """Counts a request that is refused for this reason."""

    def _refuse(self, sender: Sender, error: Exception) -> None:
        if not sender.is_probe:
            self._count(word_of(error))
        self.send_error(sender, error)

    def send_error(self, sender: Sender, error: Exception) -> None:
        """Sends the error of a deferred request from a thread of its own, because it is a round trip to the server process.

        `execute` would wait for each, and behind it all requests that Triton has not handed over yet: a tenant that is
        refused a thousand times a second would delay everybody.
        """
        response = failure(error, self.doing, sender.resends)
        if sender.is_deferred:
            self._refusing.put((sender, response))
        else:
            sender.send(response)


def request_id(request: InferenceRequest) -> str:
    """Returns the client's name for the request."""
    try:
        return request.request_id()
    except UnicodeDecodeError:
        raise InvalidInput("the id of the request is not UTF-8: send UTF-8") from None


def inputs_of(request: InferenceRequest) -> Inputs:
    """Returns the inputs of a request by their names. Triton makes a list of new objects whenever it is asked for them."""
    return {tensor.name(): tensor for tensor in request.inputs()}


def required(inputs: Inputs, name: str) -> pb_utils.Tensor:
    """Returns an input that the model's config.pbtxt does not call optional."""
    if name not in inputs:  # Triton refuses such requests before we see them
        raise InvalidInput(f"the request has no input {name}: send it")
    return inputs[name]


def texts(inputs: Inputs, name: str) -> list[str]:
    """Returns an input of strings."""
    encoded: list[bytes] = required(inputs, name).as_numpy().ravel().tolist()
    try:
        return [raw.decode() for raw in encoded]
    except UnicodeDecodeError as error:
        number = encoded.index(error.object) + 1
        raise InvalidInput(f"{name} {number} is not UTF-8 ({error.reason} at byte {error.start}): send UTF-8") from None


def optional_texts(inputs: Inputs, name: str) -> list[str] | None:
    """Returns an input of strings, or None if the request does not have it."""
    return texts(inputs, name) if name in inputs else None


def flag(inputs: Inputs, name: str, otherwise: bool = False) -> bool:
    """Returns an optional input of one truth value."""
    return bool(inputs[name].as_numpy().reshape(-1)[0]) if name in inputs else otherwise


def failure(error: Exception, doing: str = "the request", resends: bool = False) -> pb_utils.InferenceResponse:
    """Returns an error response. `doing` names what failed, for exceptions that are not an `HplmError`."""
    own = logged_error(error, doing)
    return failure_with(own.status_for(resends), own.wire())


def failure_with(status: str, message: str) -> pb_utils.InferenceResponse:
    # TritonError is read here, because the stub adds it to its utilities only after it has imported the model's file.
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, status)))
