"""The Triton backend of the baselines with a whole model for each tenant."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.engine.engine import resolve_device, resolve_dtype
from hplm.request.answers import outputs_of
from hplm.server.held import Held
from hplm.tasks import TextAnswer
from research.baselines.models import Question, WholeModels, Worker


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._held = Held(args["model_name"])
        parameters = replies.model_parameters(args)
        if int(parameters["threads"]):
            torch.set_num_threads(int(parameters["threads"]))
        device = resolve_device(parameters["device"])
        self._models = WholeModels(
            Path(args["model_repository"]) / args["model_version"],
            resident=int(parameters["resident"]),
            batch_tokens=int(parameters["batch_tokens"]),
            device=device,
            dtype=resolve_dtype(parameters["dtype"], device),
        )
        self._worker = Worker(self._models, int(parameters["queue_requests"]))

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[None]:
        """Takes the requests and returns at once. Each request is answered later, once, through its own sender."""
        for request in requests:
            sender = replies.Sender(request, self._held)
            try:
                question = self._read(request, replies.taken(request, sender))
                respond = partial(_respond, sender, set(request.requested_output_names()), question.tenant.version)
                self._worker.submit(question, respond)
            except Exception as error:
                sender.send(replies.failure(error, "taking the request"))
        return [None] * len(requests)

    def finalize(self) -> None:
        self._worker.close()
        self._held.close()

    def _read(self, request: pb_utils.InferenceRequest, parameters: Mapping[str, Any]) -> Question:
        inputs = replies.inputs_of(request)
        texts, pairs = replies.texts(inputs, "TEXT"), replies.optional_texts(inputs, "TEXT_PAIR")
        return self._models.question(parameters, texts, pairs, request.timeout() / 1e6)


def _respond(sender: replies.Sender, wanted: set[str], version: int, answer: list[TextAnswer] | Exception) -> None:
    try:
        if isinstance(answer, Exception):
            raise answer
        outputs = outputs_of(answer, wanted, [version] * len(answer))
    except Exception as error:
        sender.send(replies.failure(error, "a whole model"))
        return
    replies.send_outputs(sender, outputs)
