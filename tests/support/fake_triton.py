"""Modules of Triton's side, imported with a stand-in for what Triton gives them, and requests to their models."""

from __future__ import annotations

import importlib
import json
import queue
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from hplm.parameters import parameters_of
from tests.support.wait import PATIENCE

UTILITIES = "triton_python_backend_utils"
FINAL = 1  # the flag of a last response


class Tensor:
    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name = lambda: name
        self.as_numpy = lambda: values


class TritonError(str):
    INVALID_ARG, NOT_FOUND, UNAVAILABLE, INTERNAL, CANCELLED, UNSUPPORTED = range(6)

    code: int

    def __new__(cls, message: str, code: int) -> TritonError:
        made = super().__new__(cls, message)
        made.code = code
        return made


class Inputs(dict[str, Tensor]):
    """By name; called, they are what Triton gives."""

    def __call__(self) -> list[Tensor]:
        return list(self.values())


def fake_utilities(**more: Any) -> SimpleNamespace:
    """Returns what Triton gives to a model's module. A response is its error's message, or its outputs by name."""
    return SimpleNamespace(
        **more,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        MetricFamily=MagicMock(),
        Tensor=Tensor,
        TritonError=TritonError,
        InferenceResponse=lambda outputs=(), error=None: error or {one.name(): one.as_numpy() for one in outputs},
    )


class Request:
    """A request, which is its own sender and keeps the responses."""

    def __init__(self, inputs: Mapping[str, str | bool | list[str]], parameters: Mapping[str, Any]) -> None:
        self.inputs = Inputs({name: Tensor(name, _values(given)) for name, given in inputs.items()})
        self.parameters = lambda: json.dumps(parameters)
        self.timeout: Callable[[], int] = lambda: 0
        self.request_id = lambda: ""
        self.requested_output_names = lambda: []
        self.get_response_sender = lambda: self
        self.cancelled = False
        self.is_cancelled = lambda: self.cancelled
        self.flags: list[int] = []  # of its responses
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, response: Any, flags: int) -> None:
        assert FINAL not in self.flags, "something was sent behind the end"
        self.flags.append(flags)
        self._sent.put(response)

    def first(self) -> Any:
        """Returns the first response, and wants no more."""
        found = self.next()
        self.cancelled = True
        return found

    def next(self) -> Any:
        return self._sent.get(timeout=PATIENCE)

    @property
    def is_answered(self) -> bool:
        """Whether a response is there that nobody has read."""
        return not self._sent.empty()


def _values(given: str | bool | list[str]) -> np.ndarray:
    if isinstance(given, bool):
        return np.array([given])
    return np.array([text.encode("utf-8", "surrogatepass") for text in ([given] if isinstance(given, str) else given)], object)


@contextmanager
def model_of(repository: Path, name: str, backend: str, folder: str = "backends", **more: Any) -> Iterator[Any]:
    """Loads an exported model into this process, as Triton does in one of its own. `more`: of its utilities."""
    ours = ("backends.replies", f"{folder}.{backend}.model")
    with with_fake_triton(fake_utilities(**more), *ours) as (*_, module):
        model = module.TritonPythonModel()
        model.initialize(arguments(repository / name, parameters_of(repository / name / "config.pbtxt")))
        try:
            yield model
        finally:
            model.finalize()


def arguments(folder: Path, parameters: Mapping[str, str]) -> dict[str, str]:
    """Returns what Triton gives to a model when it loads it."""
    config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    given = {"model_repository": str(folder), "model_name": folder.name, "model_version": "1"}
    return {**given, "model_config": json.dumps(config)}


@contextmanager
def with_fake_triton(stand_in: Any, *names: str) -> Iterator[list[ModuleType]]:
    """Yields the modules, imported anew, and forgets them afterwards: those that other tests import have other stand-ins."""
    _forget((UTILITIES, *names))
    sys.modules[UTILITIES] = stand_in
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        _forget((UTILITIES, *names))


def _forget(names: tuple[str, ...]) -> None:
    for name in names:
        sys.modules.pop(name, None)
        room, _, own = name.rpartition(".")
        if room in sys.modules:
            vars(sys.modules[room]).pop(own, None)  # `from room import own` looks there first
