"""What all our Python models do with Triton: read a request's tensors and parameters, and answer it once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from hplm.engine.answer import fill, size_of
from hplm.engine.memory import SharedMemory
from hplm.errors import Broken, HplmError, InvalidInput
from hplm.tasks import Rows

log = logging.getLogger(__name__)
SHARED_MEMORY = SharedMemory()


def model_parameters(args: dict[str, str]) -> dict[str, str]:
    """The parameters of the model's config.pbtxt."""
    return {name: value["string_value"] for name, value in json.loads(args["model_config"])["parameters"].items()}


def state_folder() -> Path | None:
    """The folder of live changes that the server was started with, if any."""
    state = os.environ.get("HPLM_STATE")
    return Path(state) if state else None


def request_parameters(request: pb_utils.InferenceRequest) -> dict[str, Any]:
    """Parameters and forwarded headers, as the client sent them."""
    return json.loads(request.parameters() or "{}")


def required(request: pb_utils.InferenceRequest, name: str) -> pb_utils.Tensor:
    """An input that the model's config.pbtxt does not call optional."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:  # Triton refuses such requests before we see them
        raise InvalidInput(f"the request has no input {name}: send it")
    return tensor


def texts(request: pb_utils.InferenceRequest, name: str) -> list[str]:
    """An input of strings."""
    return _texts(required(request, name), name)


def optional_texts(request: pb_utils.InferenceRequest, name: str) -> list[str] | None:
    """None if the request has no such input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else _texts(tensor, name)


def array(request: pb_utils.InferenceRequest, name: str) -> np.ndarray:
    """A copy of an input of numbers: its memory is Triton's and goes back when the request is answered."""
    return _array(required(request, name))


def optional_array(request: pb_utils.InferenceRequest, name: str) -> np.ndarray | None:
    """None if the request has no such input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else _array(tensor)


def _texts(tensor: pb_utils.Tensor, name: str) -> list[str]:
    decoded: list[str] = []
    for i, raw in enumerate(tensor.as_numpy().reshape(-1)):
        try:
            decoded.append(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{name} {i + 1} is not UTF-8 ({error.reason} at byte {error.start})") from None
    return decoded


def _array(tensor: pb_utils.Tensor) -> np.ndarray:
    return torch.from_dlpack(tensor.to_dlpack()).numpy().copy()


def tensor(name: str, values: np.ndarray) -> pb_utils.Tensor:
    """Numbers cross as DLPack, which copies less; only strings need numpy."""
    if values.dtype == object:
        return pb_utils.Tensor(name, values)
    return pb_utils.Tensor.from_dlpack(name, torch.from_numpy(values).__dlpack__())


def failure(error: Exception, doing: str = "the request") -> pb_utils.InferenceResponse:
    """An error as the client sees it. `doing`: what failed, for an exception that is no error of ours."""
    known = error if isinstance(error, HplmError) else Broken(f"{doing} failed: {error}")
    return failure_with(known.status, known.wire())


def failure_with(status: str, message: str) -> pb_utils.InferenceResponse:
    # Looked up now: the stub adds TritonError to its utilities only after it has imported the model's file.
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, status)))


def send(sender: pb_utils.InferenceResponseSender, response: pb_utils.InferenceResponse) -> None:
    """The one answer to a request."""
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def send_answer(
    sender: pb_utils.InferenceResponseSender, wanted: Collection[str], version: int, answer: list[Rows] | Exception
) -> None:
    """The answers to all texts of a request, or the error that it ended with."""
    if isinstance(answer, Exception):
        send(sender, failure(answer))
        return
    try:
        outputs = fill(answer).outputs(wanted, version)
        response = pb_utils.InferenceResponse([tensor(name, values) for name, values in outputs.items()])
    except Exception as error:
        log.exception("an answer could not be made")
        send(sender, failure(error, "making the answer"))
        return
    try:
        with SHARED_MEMORY.taken(size_of(outputs)):
            send(sender, response)
    except Broken as error:  # nothing was sent
        log.error("%s", error)
        send(sender, failure(error))
