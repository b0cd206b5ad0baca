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
from functools import partial
from typing import Any

from backends import replies
from backends.replies import InferenceRequest
from hplm.errors import HplmError, word_of
from hplm.generation.client import DecoderClient, PendingPrompt
from hplm.generation.prompt_form import RETURNED, PromptForm
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.request.answers import AnswerEnd, Outputs, Reply, strings
from hplm.server.inherited import restarts
from hplm.tenants.arrival import ArrivalClock, Forwarding
from hplm.tenants.authorize import LIST
from hplm.threads import repeat

log = logging.getLogger(__name__)
SECONDS_BETWEEN_LOOKS = 0.05  # for clients that have gone
MOST_WAITING = 20  # requests without a token whose clients are looked for at once: thousands may wait
WELL = {"text_output": strings([b"ok"])}


class GenerateRequest(PendingPrompt):
    """Sends what comes of one request. It has exactly one end, whatever fails."""

    def __init__(
        self, sender: replies.Sender, model: replies.BackendModel, count: Callable[[AnswerEnd | str], None], form: bytes
    ) -> None:
        """`model` sends errors. `count` is called once, with the answer's end or the word of the error that the client got."""
        super().__init__(form, self._say, sender.defer)
        self.sender, self._model = sender, model
        self._count = count
        self.ended = False

    def _say(self, said: Reply | HplmError) -> None:
        """Called in order, by one thread."""
        failure = said.failure if isinstance(said, Reply) else said
        if failure is not None:
            self._model.send_error(self.sender, failure)
            self._end(failure.word)
            return
        assert isinstance(said, Reply)  # an error is a failure
        end = said.end
        try:
            failed = self.sender.send_answer(said.outputs, is_last=end is not None)
        except Exception as error:  # Triton did not take it
            if end is not None:
                self._end(word_of(error))
            raise
        if failed is not None:
            self._end(failed.word)
            raise failed
        if end is not None:
            self._end(end)

    def _end(self, end: AnswerEnd | str) -> None:
        self.ended = True
        self.respond = _ignored  # its own method would keep it, and Triton's sender, until Python looks for cycles
        self._count(end)


def _ignored(said: object) -> None:
    """Takes what follows the end of an answer, which was said before the engine knew of the end, or an end not to count."""


class TritonPythonModel(replies.BackendModel):
    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        self._meter = Meter()
        self._meter.add(names.SERVER_RESTARTS, restarts())
        self._client = DecoderClient(self._folder, self._parameters, self._state, self._meter)
        self._publish(self._meter, self._parameters["backbone"])
        self._arrivals = ArrivalClock(Forwarding(os.getppid()))
        self._open: dict[GenerateRequest, None] = {}
        self._ending = threading.Event()
        self._looking = repeat(self._look_for_cancelled, "cancelled")

    def execute(self, requests: list[InferenceRequest]) -> None:
        super().execute(requests)  # a model whose answers may be streams returns nothing

    def _well(self, request: InferenceRequest) -> Outputs:
        self._client.workers.check()
        return WELL

    def _take(
        self, request: InferenceRequest, given: dict[str, Any], sender: replies.Sender, received_ns: int
    ) -> GenerateRequest:
        """Returns the request, whose prompt is to be passed on, or raises if it was not taken."""
        inputs = replies.inputs_of(request)
        strings = (
            replies.optional_texts(inputs, name) for name in ("text_input", "messages", "token_ids", "sampling_parameters")
        )
        text, messages, ids, sampling = (own[0] if own is not None else None for own in strings)
        stream = replies.flag(inputs, "stream")
        wanted = request.requested_output_names()
        named = wanted if len(wanted) <= len(RETURNED) else set[str]()  # Triton names all where the client names none
        form = PromptForm(
            text,
            messages,
            sampling,
            given,
            stream,
            replies.flag(inputs, "exclude_input_in_output", otherwise=stream or text is None),
            tuple(name for name in RETURNED if replies.flag(inputs, name) or name.removeprefix("return_") in named),
            request.timeout(),
            self._arrivals.arrival_ns(given, received_ns),
            ids,
        )
        lists = given.get(LIST) is True  # tenants: not counted, as it generates nothing and may ask each decoder in turn
        count = _ignored if lists else partial(self._count_end, form.arrival_ns)
        answer = GenerateRequest(sender, self, count, form.packed())
        self._open[answer] = None
        return answer

    def _submit(self, accepted: list[GenerateRequest]) -> None:
        self._client.submit(accepted)

    def finalize(self) -> None:
        self._client.close()
        self._ending.set()
        self._looking.join()
        super().finalize()

    def _count(self, word: str) -> None:
        self._meter.add(names.GENERATIONS, 1, word)

    def _count_end(self, arrival_ns: int, end: AnswerEnd | str) -> None:
        """Counts a request at its end: how its answer has ended, or the word of its error."""
        outcome = end if isinstance(end, str) else end.reason
        self._count(outcome)
        self._meter.observe(names.ANSWER_SECONDS, [(time.monotonic_ns() - arrival_ns) / 1e9], outcome)
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
