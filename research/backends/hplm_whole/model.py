"""The Triton backend of the baselines with a whole model for each tenant."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backends import replies
from backends.replies import InferenceRequest
from hplm.engine.engine import resolve_device, resolve_dtype
from hplm.request.answers import TOKENS, outputs_of
from hplm.tasks.answers import EMBEDDING, TextAnswer
from research.baselines.models import WholeModels, Worker


class TritonPythonModel(replies.BackendModel):
    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        parameters = self._parameters
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

    def finalize(self) -> None:
        self._worker.close()
        super().finalize()

    def _take(self, request: InferenceRequest, given: Mapping[str, Any], sender: replies.Sender, received_ns: int) -> None:
        inputs = replies.inputs_of(request)
        texts, pairs = replies.texts(inputs, "TEXT"), replies.optional_texts(inputs, "TEXT_PAIR")
        question = self._models.question(given, texts, pairs, request.timeout() / 1e6)
        wanted = set(request.requested_output_names()) - {EMBEDDING, TOKENS}
        respond = partial(_respond, sender, wanted, question.tenant.version)
        self._worker.submit(question, respond)


def _respond(sender: replies.Sender, wanted: set[str], version: int, answer: list[TextAnswer] | Exception) -> None:
    try:
        if isinstance(answer, Exception):
            raise answer
        outputs = outputs_of(answer, wanted, [version] * len(answer))
    except Exception as error:
        sender.send(replies.failure(error, "a whole model"))
        return
    sender.send_answer(outputs)
