"""Triton's side of a baseline: whole models, one a tenant."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from hplm.engine.answer import fill, size_of
from hplm.engine.engine import resolve_device, resolve_dtype
from hplm.engine.memory import SharedRoom
from hplm.errors import Broken, HplmError, InvalidInput
from research.baselines.models import Question, WholeModels
from research.baselines.worker import Worker

SHARED_ROOM = SharedRoom()

# Names, not values: the stub adds TritonError to its utilities only after it has imported this file.
CODES = {"invalid_input": "INVALID_ARG", "no_tenant": "NOT_FOUND", "broken": "INTERNAL"}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        parameters = {key: value["string_value"] for key, value in json.loads(args["model_config"])["parameters"].items()}
        if int(parameters["threads"]):
            torch.set_num_threads(int(parameters["threads"]))
        device = resolve_device(parameters["device"])
        self._models = WholeModels(
            Path(args["model_repository"]) / args["model_version"],
            room=int(parameters["resident"]),
            batch_tokens=int(parameters["batch_tokens"]),
            device=device,
            dtype=resolve_dtype(parameters["dtype"], device),
            keep_pages=parameters["page_cache"] == "true",
        )
        self._worker = Worker(self._models, int(parameters["queue_requests"]))

    def execute(self, requests: list) -> list[None]:
        """Takes the requests and returns at once; each is answered later, through its own sender, once."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                question = self._read(request)
                respond = partial(_respond, sender, set(request.requested_output_names()), question.tenant.version)
                self._worker.submit(question, respond)
            except HplmError as error:
                _send(sender, error=error)
            except Exception as error:
                logging.exception("a request could not be taken")
                _send(sender, error=Broken(f"the request could not be taken: {error}"))
        return [None] * len(requests)

    def finalize(self) -> None:
        self._worker.close()

    def _read(self, request: pb_utils.InferenceRequest) -> Question:
        parameters = json.loads(request.parameters() or "{}")
        texts, pairs = _texts(request, "TEXT"), _texts(request, "TEXT_PAIR")
        return self._models.question(parameters, texts, pairs, request.timeout() / 1e6)


def _texts(request: pb_utils.InferenceRequest, name: str) -> list[str] | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    try:
        return [raw.decode("utf-8") for raw in tensor.as_numpy().reshape(-1)]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not UTF-8 ({error.reason} at byte {error.start})") from None


def _respond(sender: pb_utils.InferenceResponseSender, wanted: set[str], version: int, result: list | HplmError) -> None:
    if isinstance(result, HplmError):
        _send(sender, error=result)
        return
    try:
        outputs = fill(result).outputs(wanted, version)
        tensors = [_tensor(name, values) for name, values in outputs.items()]
    except Exception as error:
        logging.exception("an answer could not be made")
        _send(sender, error=Broken(f"the answer could not be made: {error}"))
        return
    try:
        with SHARED_ROOM.taken(size_of(outputs)):
            _send(sender, tensors=tensors)
    except Broken as error:  # nothing was sent
        logging.error("%s", error)
        _send(sender, error=error)


def _tensor(name: str, values: np.ndarray) -> pb_utils.Tensor:
    if values.dtype == object:
        return pb_utils.Tensor(name, values)
    return pb_utils.Tensor.from_dlpack(name, torch.from_numpy(values).__dlpack__())


def _send(sender: pb_utils.InferenceResponseSender, tensors: list | None = None, error: HplmError | None = None) -> None:
    if error is None:
        response = pb_utils.InferenceResponse(tensors)
    else:
        code = getattr(pb_utils.TritonError, CODES.get(error.word, "UNAVAILABLE"))
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(error.wire(), code))
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
