"""Triton's side of the engine: row numbers and a ticket in; labels, scores, logits and spans out, when they are ready."""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from hplm.engine.answer import fill, size_of
from hplm.engine.memory import SharedRoom
from hplm.engine.request import LookedUp
from hplm.engine.service import Service
from hplm.engine.settings import Settings
from hplm.errors import Broken, HplmError
from hplm.metrics.publisher import Publisher
from hplm.tasks import Rows
from hplm.tenants.ticket import SharedSecret, Ticket

log = logging.getLogger(__name__)

SHARED_ROOM = SharedRoom()

# Names, not values: the stub adds TritonError to its utilities only after it has imported this file.
CODES = {"invalid_input": "INVALID_ARG", "no_tenant": "NOT_FOUND", "broken": "INTERNAL"}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        parameters = {key: value["string_value"] for key, value in json.loads(args["model_config"])["parameters"].items()}
        name = parameters["backbone"]
        state = os.environ.get("HPLM_STATE")
        folder = Path(args["model_repository"]).parent / name / "1"
        self._service = Service(folder, Settings.read(parameters), Path(state) if state else None)
        instruments = self._service.instruments
        self._publisher = Publisher(
            pb_utils.MetricFamily, instruments.meter, name, before=self._service.look, keeps=instruments.keeps
        )
        self._secret = SharedSecret(name, os.getppid()).value

    def execute(self, requests: list) -> list[None]:
        """Takes the requests and returns at once; each is answered later, through its own sender, once."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._take(request, sender)
            except HplmError as error:
                _send(sender, error=error)
            except Exception as error:
                logging.exception("a request could not be taken")
                _send(sender, error=Broken(f"the request could not be taken: {error}"))
        return [None] * len(requests)

    def _take(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> None:
        signed = _input(request, "TICKET")
        ticket = Ticket.read(signed[0].tobytes() if signed is not None else b"", self._secret)
        addresses, segments, spans = (_input(request, name) for name in ("ROWS", "SEGMENTS", "SPANS"))
        looked_up = LookedUp(ticket, addresses, segments, spans, _passages(request), request.request_id())
        respond = partial(_respond, sender, set(request.requested_output_names()), ticket.version)
        self._service.submit(looked_up, respond)

    def finalize(self) -> None:
        self._service.close()
        self._publisher.close()


def _input(request: pb_utils.InferenceRequest, name: str) -> np.ndarray | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    # The tensor's memory is Triton's and goes back when the request is answered: what is kept must be a copy.
    return torch.from_dlpack(tensor.to_dlpack()).numpy().copy()


def _passages(request: pb_utils.InferenceRequest) -> list[str] | None:
    """Lookup has seen them: they are UTF-8."""
    tensor = pb_utils.get_input_tensor_by_name(request, "TEXT_PAIR")
    return None if tensor is None else [raw.decode("utf-8", "replace") for raw in tensor.as_numpy().reshape(-1)]


def _respond(sender: pb_utils.InferenceResponseSender, wanted: set[str], version: int, result: list[Rows] | Exception) -> None:
    if isinstance(result, Exception):
        _send(sender, error=result)
        return
    try:
        outputs = fill(result).outputs(wanted, version)
        tensors = [_tensor(name, values) for name, values in outputs.items()]
    except Exception as error:
        log.exception("an answer could not be made")
        _send(sender, error=Broken(f"the answer could not be made: {error}"))
        return
    try:
        with SHARED_ROOM.taken(size_of(outputs)):
            _send(sender, tensors=tensors)
    except Broken as error:  # nothing was sent
        log.error("%s", error)
        _send(sender, error=error)


def _send(sender: pb_utils.InferenceResponseSender, tensors: list | None = None, error: Exception | None = None) -> None:
    if error is not None:
        known = error if isinstance(error, HplmError) else Broken(str(error))
        code = getattr(pb_utils.TritonError, CODES.get(known.word, "UNAVAILABLE"))
        failure = pb_utils.TritonError(known.wire(), code)
        response = pb_utils.InferenceResponse(error=failure)
    else:
        response = pb_utils.InferenceResponse(tensors)
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _tensor(name: str, values: np.ndarray) -> pb_utils.Tensor:
    if values.dtype == object:
        return pb_utils.Tensor(name, values)
    return pb_utils.Tensor.from_dlpack(name, torch.from_numpy(values).__dlpack__())
