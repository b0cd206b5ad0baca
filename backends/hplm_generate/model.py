"""Triton's side of a decoder: takes prompts, and sends answers while they grow, or whole.

Names and forms of tensors are those of vLLM's backend for Triton. The model computes in this process. If the process ends, so
do all answers on their way: `hplm serve` then starts the server again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.arrays import Array
from hplm.engine.backbone import Backbone
from hplm.engine.engine import resolve_device, resolve_dtype
from hplm.engine.views import Watch
from hplm.errors import HplmError, InvalidInput, word_of
from hplm.generation.choosing import Token
from hplm.generation.promise import promise_of
from hplm.generation.request import Piece, Request
from hplm.generation.sampling import sampling_of
from hplm.generation.service import Service
from hplm.generation.settings import read_settings
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.metrics.publisher import Publisher
from hplm.model.openmp import apart
from hplm.model.prompts import Messages, Prompts
from hplm.parameters import Parameters, asked_flag, asked_number, yes_or_no
from hplm.plot.table import Table
from hplm.server import folder_lock
from hplm.server.control import REVIVED
from hplm.server.held import Held
from hplm.server.inherited import restarts
from hplm.tenants.arrival import CANCEL, PROMPT, Arrivals, Mark
from hplm.tenants.authorize import admit, opened

log = logging.getLogger(__name__)
SECONDS_BETWEEN_LOOKS = 0.05  # for clients that have gone
MOST_WAITING = 20  # requests without a token whose clients are looked for at once: thousands may wait
TENANTS = "hplm_tenants"  # a parameter that asks which tenants the key opens, instead of a prompt's answer
FINISH_REASON, PROMPT_TOKENS, GENERATED_TOKENS, LOGPROBS = RETURNED = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_logprobs",
)  # inputs that ask for more outputs


@dataclass
class Choice:
    """The part of one answer, of `n`, that was not sent yet."""

    text: str = ""
    finish: str = ""
    tokens: list[Token] = field(default_factory=list[Token])


class Answer:
    """Sends what is said of one request. It has exactly one end, whatever fails."""

    def __init__(
        self,
        sender: replies.Sender,
        prompts: Prompts,
        count: Callable[[Piece | str], None],
        *,
        choices: int,
        stream: bool,
        returned: Set[str],
    ) -> None:
        """`count` is called once for each answer, with the last piece or the word of the error that the client got.

        `stream`: send parts as they come. `returned`: more outputs that the client asked for, of RETURNED.
        """
        self._sender = sender
        self._prompts = prompts
        self._count = count
        self._stream = stream
        self._returned = returned
        self._unsent = [Choice() for _ in range(choices)]
        self.ended = False
        self.name = ""  # of a prompt that the model `hplm` has forwarded

    def say(self, piece: Piece | HplmError) -> None:
        """Called in order, by one thread."""
        if self.ended:  # what followed an error was said before the loop knew of it
            return
        if isinstance(piece, HplmError):
            self.fail(piece)
            return
        choice = self._unsent[piece.choice]
        choice.text += piece.text
        choice.finish = piece.finish or ""
        choice.tokens += piece.tokens
        if not (piece.is_last or self._stream):
            return
        try:
            outputs = self._outputs(piece)
        except Exception as error:
            self.fail(error)
            raise
        self._unsent = [Choice() for _ in self._unsent]
        try:
            failed = replies.send_outputs(self._sender, outputs, is_last=piece.is_last)
        except Exception as error:  # Triton did not take it
            if piece.is_last:
                self._end(word_of(error))
            raise
        if failed is not None:
            self._end(failed.word)
            raise failed
        if piece.is_last:
            self._end(piece)

    def _end(self, end: Piece | str) -> None:
        self.ended = True
        self._count(end)

    def fail(self, error: Exception) -> None:
        self._end(word_of(error))
        self._sender.send(replies.failure(error, "generating"))

    @property
    def is_unwanted(self) -> bool:
        """Whether the client has gone before its answer has ended. To ask is a round trip to the server process."""
        return self._sender.is_cancelled

    def _outputs(self, piece: Piece) -> dict[str, Array]:
        returned, parts = self._returned, self._unsent
        outputs = {"text_output": _strings([part.text for part in parts])}
        if FINISH_REASON in returned:
            outputs["finish_reason"] = _strings([part.finish for part in parts])
        if PROMPT_TOKENS in returned:
            outputs["num_input_tokens"] = np.array([piece.prompt_tokens], dtype=np.uint32)
        if GENERATED_TOKENS in returned:
            outputs["num_output_tokens"] = np.array([len(part.tokens) for part in parts], dtype=np.uint32)
        if LOGPROBS in returned:
            outputs["logprobs"] = _strings([json.dumps([self._told(token) for token in part.tokens]) for part in parts])
        return outputs

    def _told(self, token: Token) -> dict[str, dict[str, Any]]:
        """Returns the logprobs of a token and of the likeliest ones in its place, by id. The token itself comes first."""
        known = {token.id: token.logprob, **dict(token.likeliest)}
        return {
            str(id): {"logprob": logprob, "decoded_token": self._prompts.decode([id], special=True)}
            for id, logprob in known.items()
        }


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        parameters = Parameters(replies.model_parameters(args))
        name = parameters["backbone"]
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the other cores compute
        device = resolve_device(parameters["device"])
        settings = read_settings(parameters, device, _dtype(parameters["dtype"], device))
        self._preload = yes_or_no(parameters, "plot_preload")
        folder = Path(args["model_repository"]).parent / name / "1"
        folder_lock.share(folder.parent)
        self._backbone = Backbone(folder, replies.given_state(), self._prepare)
        self._prompts = Prompts.load(folder / Backbone.TOKENIZER, self._backbone.config)
        self._meter = Meter()
        self._service = apart(lambda: Service(self._backbone, self._prompts, settings, self._meter))
        self._watch = Watch(self._backbone)
        self._meter.add(names.SERVER_RESTARTS, restarts())
        self._meter.add(names.MODEL_RESTARTS, int(parameters.get(REVIVED, "0")), args["model_name"])
        self._put_back = 0  # as counted until now
        self._seats = settings.max_sequences
        self._adapters: tuple[tuple[str, ...], tuple[str, ...]] | None = None  # loaded and awaited, as published last
        self._publisher = Publisher(pb_utils.MetricFamily, self._meter, name, before=self._look)
        self._mark = Mark(os.getppid())
        self._arrivals = Arrivals(self._mark)
        self._held = Held(args["model_name"])
        self._refusals = replies.Refusals("taking the request")
        self._open: dict[Answer, Request] = {}
        self._ending = threading.Event()
        self._looking = threading.Thread(target=self._look_for_cancelled, name="cancelled", daemon=True)
        self._looking.start()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        """Takes the requests and returns at once. Each is answered later, through its own sender."""
        received = time.monotonic_ns()
        for request in requests:
            sender = replies.Sender(request, self._held)
            try:
                self._take(request, sender, received)
            except Exception as error:
                if not sender.is_probe:
                    self._count(word_of(error))
                self._refusals.put(sender, error)

    def _take(self, request: pb_utils.InferenceRequest, sender: replies.Sender, received_ns: int) -> None:
        """Raises if the request was not taken. One that was taken gets its end through `sender`."""
        parameters = replies.taken(request, sender)
        if sender.is_probe:
            self._service.check()
            replies.send_outputs(sender, {"text_output": _strings(["ok"])})
            return
        forwarded = self._mark.is_on(parameters)
        if forwarded and CANCEL in parameters:
            self._cancel(str(parameters[CANCEL]))
            replies.send_outputs(sender, {"text_output": _strings(["ok"])})
            return
        view = self._backbone.view
        if asked_flag(parameters, TENANTS):
            ids = opened(view.snapshot, parameters, time.time())
            replies.send_outputs(sender, {"text_output": _strings([json.dumps(ids)])})
            return
        tenant = admit(view.snapshot, parameters, time.time(), self._backbone.is_stale)
        asked_number(parameters, "hplm_rung", 0, 2**16 - 1)  # raises if it is none; decoders have one tier
        prompt = self._prompt(request)
        given = replies.optional_texts(request, "sampling_parameters")
        sampling = sampling_of(parameters, given[0] if given else None)
        stream = replies.flag(request, "stream")
        if not replies.flag(request, "exclude_input_in_output", otherwise=stream or isinstance(prompt, Messages)):
            sampling = replace(sampling, echo=True)
        returned = {name for name in RETURNED if replies.flag(request, name)}
        answer = Answer(sender, self._prompts, self._count, choices=sampling.n, stream=stream, returned=returned)
        answer.name = str(parameters.get(PROMPT, "")) if forwarded else ""
        self._open[answer] = self._service.submit(
            view,
            tenant,
            prompt,
            sampling,
            answer.say,
            promise=promise_of(parameters, request.timeout()),
            truncate=asked_flag(parameters, "truncate"),
            priority=asked_number(parameters, "hplm_priority", -(2**31), 2**31 - 1),
            arrival_ns=self._arrivals.arrival_ns(parameters, received_ns),
        )

    def _cancel(self, name: str) -> None:
        """Cancels a prompt of the model `hplm`. Triton does not say here that its client has gone."""
        for answer, request in list(self._open.items()):
            if answer.name == name:
                self._service.cancel(request)

    def _prompt(self, request: pb_utils.InferenceRequest) -> str | Messages:
        text, messages = (replies.optional_texts(request, name) for name in ("text_input", "messages"))
        if text is not None and messages is None:
            return text[0]
        if messages is not None and text is None:
            return Messages(messages[0])
        raise InvalidInput("the request needs either 'text_input' or 'messages': send just one of them")

    def finalize(self) -> None:
        self._service.close()
        self._ending.set()
        self._looking.join()
        self._refusals.close()
        self._publisher.close()
        self._watch.close()
        self._held.close()

    def _prepare(self, table: Table) -> None:
        """Opens what the first request would otherwise wait for."""
        _, rows = table.index, table.rows
        if self._preload:
            rows.preload()

    def _count(self, end: Piece | str) -> None:
        """Counts a request at its end: its last piece, or the word of its error."""
        self._meter.add(names.GENERATIONS, 1, end if isinstance(end, str) else end.finish or "")
        if not isinstance(end, str):
            self._meter.add(names.GENERATED_TOKENS, end.generated_tokens)
            self._meter.add(names.PROMPT_TOKENS, end.prompt_tokens)

    def _look(self) -> None:
        """Sets the meter's levels, and counts what was put back."""
        levels = self._service.levels
        self._meter.set(names.RUNNING_SEQUENCES, levels.running)
        self._meter.set(names.WAITING_SEQUENCES, levels.waiting)
        self._meter.set(names.CACHE_TOKENS, levels.cached)
        self._meter.set(names.CACHE_ROOM, levels.room)
        self._meter.set(names.CACHE_SHARE, levels.cached / levels.room)
        if (levels.loaded, levels.awaited) != self._adapters:
            self._adapters = levels.loaded, levels.awaited
            self._meter.set_only(names.ADAPTERS_INFO, time.time(), str(self._seats), *map(",".join, self._adapters))
        if self._backbone.state is not None:
            self._meter.set(names.REGISTRY_AGE_SECONDS, self._backbone.age)
        self._meter.add(names.PUT_BACK, levels.put_back - self._put_back)
        self._put_back = levels.put_back

    def _look_for_cancelled(self) -> None:
        """Frees the memory of answers that nobody reads any more: at once of those that grow, in turn of those that wait."""
        while not self._ending.wait(SECONDS_BETWEEN_LOOKS):
            waiting = 0
            for answer, request in list(self._open.items()):
                if answer.ended or request.cancelled:
                    del self._open[answer]
                    continue
                if not request.first_token_ns:
                    waiting += 1
                    if waiting > MOST_WAITING:
                        continue
                    self._open[answer] = self._open.pop(answer)  # behind those that are next
                try:
                    if answer.is_unwanted:
                        self._service.cancel(request)
                except Exception:  # the answers of others must still be looked at
                    log.exception("cannot ask whether a client has gone")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the precision. On a CPU `auto` is fp32, because only fp32 has a compiled kernel for attention."""
    return resolve_dtype("fp32" if name == "auto" and device.type == "cpu" else name, device)


def _strings(texts: Sequence[str]) -> Array:
    values = np.empty(len(texts), dtype=object)
    values[:] = [text.encode() for text in texts]
    return values
