"""Triton's side of the engine: takes row addresses and a ticket, and later sends labels, scores, logits and spans.

The engine is a process of its own. This one keeps the senders, so that every request is answered even if the engine ends.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.engine.channel import Failure, Outputs
from hplm.engine.keeper import Keeper
from hplm.engine.looked_up import LookedUp
from hplm.errors import HplmError
from hplm.metrics.meter import Meter
from hplm.metrics.publisher import Publisher
from hplm.tenants.ticket import SharedSecret, Ticket


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        parameters = replies.model_parameters(args)
        name = parameters["backbone"]
        meter = Meter()
        self._keeper = Keeper(Path(args["model_repository"]).parent / name / "1", parameters, replies.state_folder(), meter)
        self._publisher = Publisher(pb_utils.MetricFamily, meter, name, keeps=self._keeper.keeps)
        self._secret = SharedSecret(name, os.getppid()).value

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[None]:
        """Takes the requests and returns at once. Each is answered once, later, through its own sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._take(request, sender)
            except Exception as error:
                replies.send(sender, replies.failure(error, "taking the request"))
        return [None] * len(requests)

    def _take(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> None:
        signed = replies.optional_array(request, "TICKET")
        ticket = Ticket.read(signed[0].tobytes() if signed is not None else b"", self._secret)
        rows, segments, spans = (replies.array(request, name) for name in ("ROWS", "SEGMENTS", "SPANS"))
        passages = replies.optional_texts(request, "TEXT_PAIR")
        wanted = frozenset(request.requested_output_names())
        respond = partial(_respond, sender)
        self._keeper.submit(ticket, LookedUp(rows, segments, spans), respond, passages, replies.request_id(request), wanted)

    def finalize(self) -> None:
        self._keeper.close()
        self._publisher.close()


def _respond(sender: pb_utils.InferenceResponseSender, answer: Outputs | Failure) -> HplmError | None:
    """Sends an answer. Returns the error that was sent instead, if there was no shared memory for it."""
    if not isinstance(answer, tuple):
        return replies.send_outputs(sender, answer)
    replies.send(sender, replies.failure_with(*answer))
    return None
