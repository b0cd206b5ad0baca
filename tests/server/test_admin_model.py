"""The model for management: commands run, wait and fail. They are played here, and so is Triton."""

import threading

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError, InvalidInput
from hplm.tenants.commands import Commands
from tests.support.fake_triton import Request, model_of
from tests.support.message import mentioning
from tests.support.servers import ADMIN_KEY
from tests.support.wait import PATIENCE, Hold, eventually


def request(command="", key=ADMIN_KEY):
    return Request({"COMMAND": [command]}, {"authorization": f"Bearer {key}"})


def answer(request):
    """Returns the only answer, as soon as it is there."""
    found = request.next()
    assert not request.is_answered
    return found if isinstance(found, str) else found["ANSWER"][0].decode()


@pytest.fixture(scope="module")
def repository(toy, tmp_path_factory):
    repository = tmp_path_factory.mktemp("admin")
    export(toy.store, repository, ServingOptions(dtype="fp32", admin=True))
    return repository


@pytest.fixture
def opened(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("HPLM_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("HPLM_STATE", str(tmp_path))
    return model_of(repository, "toy-admin", "hplm_admin")


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
    asked = [request(command) for command in commands]
    model.execute(asked)
    hold.until_reached()
    return asked


def test_commands_are_answered_in_turn_whatever_becomes_of_those_before_them(model, hold):
    hold.open()
    asked = [request("wrong"), request("first"), request("second", key="another"), request("third")]
    model.execute(asked)
    words = [answer(one).partition("]")[0] for one in asked]
    assert words == ["[invalid_input", "done first", "[no_tenant", "done third"]


def test_only_so_many_commands_wait_and_probes_do_not(model, hold):
    run_first(model, hold, "running")
    model.execute([probe := Request({}, {"hplm_probe": True})])
    assert answer(probe) == "{}"
    asked = [request(str(number)) for number in range(200)]
    model.execute(asked)
    eventually(lambda: any(one.is_answered for one in asked))
    hold.open()
    answers = [answer(one) for one in asked]
    done = [said for said in answers if not said.startswith("[queue_full]")]
    assert 0 < len(done) < len(asked) and done == [f"done {number}" for number, said in enumerate(answers) if said in done]


def test_a_model_that_is_unloaded_ends_its_command_and_answers_those_that_wait(model, hold):
    asked = run_first(model, hold, "0", "1", "2")
    ending = threading.Thread(target=model.finalize)
    ending.start()
    eventually(lambda: model._closing.is_set())
    hold.open()
    ending.join(PATIENCE)
    assert not ending.is_alive()
    assert [answer(one).partition("]")[0] for one in asked] == ["done 0", "[draining", "[draining"]


@pytest.mark.parametrize(("variable", "value"), [("HPLM_ADMIN_KEY", ""), ("HPLM_ADMIN_KEY", " \n"), ("HPLM_STATE", "")])
def test_it_needs_a_key_and_a_state(opened, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(HplmError, match=mentioning("HPLM_ADMIN_KEY", "HPLM_STATE")), opened:
        raise AssertionError("it has loaded")
