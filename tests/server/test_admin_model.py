"""The model for management while commands run, wait and fail. A stand-in plays Triton's part, another one the commands."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hplm.errors import InvalidInput
from hplm.server.probing import PROBE
from tests.support.fake_triton import with_fake_triton
from tests.support.wait import PATIENCE, eventually

KEY, FINAL = "a secret of the operator", 1
MODULES = ("backends.replies", "backends.hplm_admin.model")


class Error:
    INVALID_ARG, NOT_FOUND, UNAVAILABLE, INTERNAL = range(4)

    def __init__(self, message, code):
        self.message = message


class Triton:
    """The part of Triton's interface for models that this one uses."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    TritonError = Error

    @staticmethod
    def Tensor(name, values):
        return values.reshape(-1)[0].decode()

    @staticmethod
    def InferenceResponse(tensors=(), error=None):
        return error.message if error else tensors[0]

    @staticmethod
    def get_input_tensor_by_name(request, name):
        return SimpleNamespace(as_numpy=lambda: np.array([request.command], dtype=object))


class Request:
    def __init__(self, command="", key=KEY, **parameters):
        self.command, self.answers = command.encode(), []
        self._parameters = {"authorization": f"Bearer {key}", **parameters}

    def parameters(self):
        return json.dumps(self._parameters)

    def get_response_sender(self):
        return self

    def send(self, response, flags):
        assert flags == FINAL
        self.answers.append(response)

    @property
    def answer(self):
        """The only answer, as soon as it is there."""
        eventually(lambda: self.answers)
        (answer,) = self.answers
        return answer


class Commands:
    """Commands that run until the test opens the gate."""

    def __init__(self):
        self.running, self.gate = threading.Event(), threading.Event()

    def run(self, command):
        self.running.set()
        assert self.gate.wait(PATIENCE)
        if command == "wrong":
            raise InvalidInput("a wrong command")
        return f"done {command}"


@pytest.fixture
def commands():
    return Commands()


@pytest.fixture
def model(monkeypatch, tmp_path, commands):
    monkeypatch.setenv("HPLM_ADMIN_KEY", KEY)
    monkeypatch.setenv("HPLM_STATE", str(tmp_path))
    with with_fake_triton(Triton(), *MODULES) as (_, module):
        monkeypatch.setattr(module, "Manager", lambda folder, state: None)
        monkeypatch.setattr(module, "BackboneConfig", SimpleNamespace(load=lambda path: None))
        monkeypatch.setattr(module, "Commands", lambda manager, config: commands)
        model = module.TritonPythonModel()
        config = json.dumps({"parameters": {"backbone": {"string_value": "toy"}}})
        model.initialize({"model_repository": str(tmp_path), "model_name": "toy-admin", "model_config": config})
        yield model
        commands.gate.set()
        model.finalize()


def test_a_probe_is_answered_while_a_command_runs_and_the_command_is_not_lost(model, commands):
    long, probe = Request("long"), Request(**{PROBE: True})
    model.execute([long])
    assert commands.running.wait(PATIENCE)
    model.execute([probe])
    assert probe.answer == "{}" and not long.answers
    commands.gate.set()
    assert long.answer == "done long"


def test_commands_are_answered_in_turn_whatever_becomes_of_those_before_them(model, commands):
    commands.gate.set()
    asked = [Request("wrong"), Request("first"), Request("second", key="another"), Request("third")]
    model.execute(asked)
    words = [one.answer.partition("]")[0] for one in asked]
    assert words == ["[invalid_input", "done first", "[no_tenant", "done third"]


def test_only_so_many_commands_wait(model, commands):
    model.execute([Request("running")])
    assert commands.running.wait(PATIENCE)
    waiting = [Request(str(number)) for number in range(model._waiting.maxsize)]
    model.execute(waiting)
    refused = Request("one more")
    model.execute([refused])
    assert refused.answer.startswith("[queue_full]") and not any(one.answers for one in waiting)
    commands.gate.set()
    assert [one.answer for one in waiting] == [f"done {number}" for number in range(len(waiting))]


def test_a_model_that_is_unloaded_ends_its_command_and_answers_those_that_wait(model, commands):
    asked = [Request(str(number)) for number in range(3)]
    model.execute(asked[:1])
    assert commands.running.wait(PATIENCE)
    model.execute(asked[1:])
    ending = threading.Thread(target=model.finalize)
    ending.start()
    eventually(lambda: model._closing.is_set())
    commands.gate.set()
    ending.join(PATIENCE)
    assert not ending.is_alive()
    assert [one.answer.partition("]")[0] for one in asked] == ["done 0", "[draining", "[draining"]
