"""Triton's side of the engine: takes row addresses and a ticket, and later sends labels, scores, logits and spans."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.engine.lookup import LookedUp
from hplm.engine.service import Service
from hplm.engine.settings import Settings
from hplm.metrics.publisher import Publisher
from hplm.tenants.ticket import SharedSecret, Ticket


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        parameters = replies.model_parameters(args)
        name = parameters["backbone"]
        folder = Path(args["model_repository"]).parent / name / "1"
        self._service = Service(folder, Settings.read(parameters), replies.state_folder())
        instruments = self._service.instruments
        self._publisher = Publisher(
            pb_utils.MetricFamily, instruments.meter, name, before=self._service.look, keeps=instruments.keeps
        )
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
        respond = partial(replies.send_answer, sender, set(request.requested_output_names()), ticket.version)
        passages = replies.optional_texts(request, "TEXT_PAIR")
        self._service.submit(ticket, LookedUp(rows, segments, spans), respond, passages, replies.request_id(request))

    def finalize(self) -> None:
        self._service.close()
        self._publisher.close()
