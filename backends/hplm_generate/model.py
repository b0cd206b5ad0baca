"""Triton's side of a decoder: takes prompts, and sends answers while they grow, or whole.

Names and forms of tensors are those of vLLM's backend for Triton. The decoder is a process of its own. This one keeps the
requests, so that every request is answered even if that process ends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.engine.client import Failure
from hplm.engine.threads import repeat
from hplm.errors import Internal, error_in, word_of
from hplm.generation.asked import NAMES, RETURNED, Asked
from hplm.generation.client import DecoderClient, PendingPrompt
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.metrics.publisher import Publisher
from hplm.request.answers import End, Reply, strings
from hplm.server.control import REVIVED
from hplm.server.held import Held
from hplm.server.inherited import restarts
from hplm.tenants.arrival import CANCEL, PROMPT, Arrivals, Mark

log = logging.getLogger(__name__)
SECONDS_BETWEEN_LOOKS = 0.05  # for clients that have gone
MOST_WAITING = 20  # requests without a token whose clients are looked for at once: thousands may wait
WELL = {"text_output": strings([b"ok"])}


class Answer(PendingPrompt):
    """Sends what comes of one request. It has exactly one end, whatever fails."""

    def __init__(
        self, sender: replies.Sender, refusals: replies.Refusals, count: Callable[[End | str], None], form: bytes, name: str
    ) -> None:
        """`refusals` send errors. `count` is called once, with the answer's end or the word of the error that the client got.

        `name`: of a prompt that the model `hplm` has forwarded.
        """
        super().__init__(form, self._say, sender.defer)
        self.name = name
        self.sender, self._refusals = sender, refusals
        self._count = count
        self.ended = False

    def _say(self, said: Reply | Failure) -> None:
        """Called in order, by one thread."""
        failure = said.failure if isinstance(said, Reply) else said
        if failure is not None:
            self._refusals.send(self.sender, replies.failure_with(*failure))
            self._end((error_in(failure[1]) or Internal).word)
            return
        assert isinstance(said, Reply)  # any other tuple is a failure
        end = said.end
        try:
            failed = replies.send_outputs(self.sender, said.outputs, is_last=end is not None)
        except Exception as error:  # Triton did not take it
            if end is not None:
                self._end(word_of(error))
            raise
        if failed is not None:
            self._end(failed.word)
            raise failed
        if end is not None:
            self._end(end)

    def _end(self, end: End | str) -> None:
        self.ended = True
        self.respond = _ignored  # its own method would keep it, and Triton's sender, until Python looks for cycles
        self._count(end)


def _ignored(said: Reply | Failure) -> None:
    """Takes what follows the end of an answer. It was said before the engine knew of the end."""


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = replies.model_parameters(args)
        name = parameters["backbone"]
        folder = Path(args["model_repository"]).parent / name / "1"
        self._meter = Meter()
        self._meter.add(names.SERVER_RESTARTS, restarts())
        self._meter.add(names.MODEL_RESTARTS, int(parameters.get(REVIVED, "0")), args["model_name"])
        self._client = DecoderClient([folder], parameters, replies.given_state(), [self._meter])
        self._publisher = Publisher(pb_utils.MetricFamily, self._meter, name)
        self._mark = Mark(os.getppid())
        self._arrivals = Arrivals(self._mark)
        self._held = Held(args["model_name"])
        self._refusals = replies.Refusals("taking the request")
        self._open: dict[Answer, None] = {}
        self._ending = threading.Event()
        self._looking = repeat(self._look_for_cancelled, "cancelled")

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        """Takes the requests and returns at once. Each is answered later, through its own sender."""
        received, pending = time.monotonic_ns(), list[Answer]()
        for request in requests:
            sender = replies.Sender(request, self._held)
            try:
                pending += self._taken(request, sender, received)
            except Exception as error:
                if not sender.is_probe:
                    self._count(word_of(error))
                self._refusals.put(sender, error)
        self._client.submit(pending)

    def _taken(self, request: pb_utils.InferenceRequest, sender: replies.Sender, received_ns: int) -> list[Answer]:
        """Returns the request if its prompt is to be passed on, or raises if it was not taken."""
        parameters = replies.taken(request, sender)
        if sender.is_probe:
            self._client.workers.check()
            replies.send_outputs(sender, WELL)
            return []
        forwarded = self._mark.is_on(parameters)
        if forwarded and CANCEL in parameters:
            self._cancel(str(parameters[CANCEL]))
            replies.send_outputs(sender, WELL)
            return []
        inputs = replies.inputs_of(request)
        strings = (replies.optional_texts(inputs, name) for name in ("text_input", "messages", "sampling_parameters"))
        text, messages, sampling = (given[0] if given is not None else None for given in strings)
        stream = replies.flag(inputs, "stream")
        wanted = request.requested_output_names()
        named = wanted if len(wanted) <= len(RETURNED) else set[str]()  # Triton names all where the client names none
        asked = Asked(
            text,
            messages,
            sampling,
            parameters,
            stream,
            replies.flag(inputs, "exclude_input_in_output", otherwise=stream or messages is not None),
            tuple(name for name in RETURNED if replies.flag(inputs, name) or name.removeprefix("return_") in named),
            request.timeout(),
            self._arrivals.arrival_ns(parameters, received_ns),
        )
        name = str(parameters.get(PROMPT, "")) if forwarded else ""
        answer = Answer(sender, self._refusals, self._count, asked.packed(), name)
        self._open[answer] = None
        return [answer]

    def _cancel(self, name: str) -> None:
        """Cancels a prompt of the model `hplm`. Triton does not say here that its client has gone."""
        for answer in list(self._open):
            if answer.name == name:
                self._client.cancel(answer)

    def finalize(self) -> None:
        self._client.close()
        self._ending.set()
        self._looking.join()
        self._refusals.close()
        self._publisher.close()
        self._held.close()

    def _count(self, end: End | str) -> None:
        """Counts a request at its end: how its answer has ended, or the word of its error."""
        if end == NAMES:
            return  # it has asked for names, not for text
        self._meter.add(names.GENERATIONS, 1, end if isinstance(end, str) else end.reason)
        if not isinstance(end, str):
            self._meter.add(names.GENERATED_TOKENS, end.generated_tokens)
            self._meter.add(names.PROMPT_TOKENS, end.prompt_tokens)

    def _look_for_cancelled(self) -> bool:
        """Frees the memory of answers that nobody reads any more: at once of those that grow, in turn of those that wait."""
        waiting = 0
        for answer in list(self._open):
            if answer.ended or answer.is_cancelled:
                del self._open[answer]
                continue
            if not answer.grows:
                waiting += 1
                if waiting > MOST_WAITING:
                    continue
                self._open[answer] = self._open.pop(answer)  # behind those that are next
            try:
                if answer.sender.is_cancelled:
                    self._client.cancel(answer)
            except Exception:  # the answers of others must still be looked at
                log.exception("cannot ask whether a client has gone")
        return not self._ending.wait(SECONDS_BETWEEN_LOOKS)
