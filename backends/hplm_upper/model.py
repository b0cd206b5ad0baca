"""Triton's side of the engine: takes the tickets of looked-up texts, and later sends labels, scores, logits and spans.

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
from hplm.engine.keeper import Asked, Keeper
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
        asked: list[Asked] = []
        for request in requests:
            sender = request.get_response_sender()
            try:
                asked.append(self._read(request, sender))
            except Exception as error:
                replies.send(sender, replies.failure(error, "taking the request"))
        self._keeper.submit(asked)
        return [None] * len(requests)

    def _read(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> Asked:
        signed = replies.required(request, "TICKET").as_numpy().tobytes()  # a copy: Triton frees the memory with the answer
        Ticket.check(signed, self._secret)
        wanted = frozenset(request.requested_output_names())
        return Asked(signed, replies.request_id(request), wanted, partial(_respond, sender))

    def finalize(self) -> None:
        self._keeper.close()
        self._publisher.close()


def _respond(sender: pb_utils.InferenceResponseSender, answer: Outputs | Failure) -> HplmError | None:
    """Sends an answer. Returns the error that was sent instead, if there was no shared memory for it."""
    if not isinstance(answer, tuple):
        return replies.send_outputs(sender, answer)
    replies.send(sender, replies.failure_with(*answer))
    return None
