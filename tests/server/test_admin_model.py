"""The model for management while commands run, wait and fail. The commands are played here, and so is Triton."""

import threading

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError, InvalidInput
from hplm.server.probing import PROBE
from hplm.tenants.commands import Commands
from tests.support import fake_triton
from tests.support.message import mentioning
from tests.support.servers import ADMIN_KEY
from tests.support.wait import PATIENCE, Hold, eventually


class Request(fake_triton.Request):
    """A request, and the answers to it."""

    def __init__(self, command="", key=ADMIN_KEY, **parameters):
        super().__init__({"COMMAND": [command]}, {"authorization": f"Bearer {key}", **parameters})
        self.answers = []

    def send(self, response, flags):
        assert flags == fake_triton.FINAL
        self.answers.append(response["ANSWER"][0].decode() if isinstance(response, dict) else response)

    @property
    def answer(self):
        """The only answer, as soon as it is there."""
        eventually(lambda: self.answers)
        (answer,) = self.answers
        return answer


@pytest.fixture(scope="module")
def repository(toy, tmp_path_factory):
    repository = tmp_path_factory.mktemp("admin")
    export(toy.store, repository, ServingOptions(dtype="fp32", admin=True))
    return repository


@pytest.fixture
def opened(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("HPLM_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("HPLM_STATE", str(tmp_path))
    return fake_triton.model_of(repository, "toy-admin", "hplm_admin")


@pytest.fixture
def hold():
    return Hold()


@pytest.fixture
def model(opened, hold, monkeypatch):
    def run(self, command):
        """A command that runs until a test lets it go."""
        hold.pass_through()
        if command == "wrong":
            raise InvalidInput("a wrong command")
        return f"done {command}"

    monkeypatch.setattr(Commands, "run", run)
    with opened as model, hold:
        yield model


def run_first(model, hold, *commands):
    """Gives the model these commands, of which the first one runs."""
    asked = [Request(command) for command in commands]
    model.execute(asked)
    hold.until_reached()
    return asked


def test_a_probe_is_answered_while_a_command_runs_and_the_command_is_not_lost(model, hold):
    (long,), probe = run_first(model, hold, "long"), Request(**{PROBE: True})
    model.execute([probe])
    assert probe.answer == "{}" and not long.answers
    hold.open()
    assert long.answer == "done long"


def test_commands_are_answered_in_turn_whatever_becomes_of_those_before_them(model, hold):
    hold.open()
    asked = [Request("wrong"), Request("first"), Request("second", key="another"), Request("third")]
    model.execute(asked)
    words = [one.answer.partition("]")[0] for one in asked]
    assert words == ["[invalid_input", "done first", "[no_tenant", "done third"]


def test_only_so_many_commands_wait(model, hold):
    run_first(model, hold, "running")
    asked = [Request(str(number)) for number in range(200)]
    model.execute(asked)
    eventually(lambda: any(one.answers for one in asked))
    hold.open()
    refused = [one.answer.startswith("[queue_full]") for one in asked]
    assert 0 < sum(refused) < len(asked)
    assert all(asked[number].answer == f"done {number}" for number, full in enumerate(refused) if not full)


def test_a_model_that_is_unloaded_ends_its_command_and_answers_those_that_wait(model, hold):
    asked = run_first(model, hold, "0", "1", "2")
    ending = threading.Thread(target=model.finalize)
    ending.start()
    eventually(lambda: model._closing.is_set())
    hold.open()
    ending.join(PATIENCE)
    assert not ending.is_alive()
    assert [one.answer.partition("]")[0] for one in asked] == ["done 0", "[draining", "[draining"]


@pytest.mark.parametrize(("variable", "value"), [("HPLM_ADMIN_KEY", ""), ("HPLM_ADMIN_KEY", " \n"), ("HPLM_STATE", "")])
def test_it_needs_a_key_and_a_state(opened, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(HplmError, match=mentioning("HPLM_ADMIN_KEY", "HPLM_STATE")), opened:
        raise AssertionError("it has loaded")
