"""The model for management: commands run, wait and fail. Triton is played here."""

import threading

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError
from hplm.registry.folder import Folder
from hplm.registry.pointer import begin
from tests.support.fake_triton import Request, model_of
from tests.support.faulty_store import FaultyStore
from tests.support.message import mentioning, mentions
from tests.support.servers import ADMIN_KEY
from tests.support.wait import PATIENCE, Hold, eventually

CHANGE, COMPACT = '{"command": "tenant.limit", "id": "acme", "rate": 5}', '{"command": "tenant.compact"}'
DONE = '{"bytes": 0}'


def request(command=COMPACT, key=ADMIN_KEY):
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
def model(opened, hold, tmp_path):
    """Its first change runs until a test lets it go, and then finds that the disk is full."""
    begin(Folder(tmp_path / "toy"))
    state = FaultyStore(tmp_path / "toy", decides="CURRENT")
    with opened as model, state.at(1, lambda store, *given: hold.pass_through() or store.fail(*given)), hold:
        yield model


def run_first(model, hold, *others):
    """Gives the model a change, which runs, and other commands."""
    asked = [request(CHANGE), *others]
    model.execute(asked)
    hold.until_reached()
    return asked


def test_commands_are_answered_in_turn_whatever_becomes_of_those_before_them(model):
    asked = [request("wrong"), request(), request(key="another"), request('{"command": "log"}'), request(key="")]
    model.execute(asked)
    said = [answer(one) for one in asked]
    assert all(mentions(one, "HPLM_ADMIN_KEY", "authorization") and "tenant'" not in one for one in (said[2], said[4]))
    words = [one.partition("]")[0] for one in said]
    assert words == ["[invalid_input", DONE, "[no_tenant", '{"changes": [', "[no_tenant"]


def test_only_so_many_commands_wait_and_probes_do_not(model, hold):
    run_first(model, hold)
    model.execute([probe := Request({}, {"hplm_probe": True})])
    assert answer(probe) == "{}"
    asked = [request() for _ in range(200)]
    model.execute(asked)
    eventually(lambda: any(one.is_answered for one in asked))
    hold.open()
    answers = [answer(one) for one in asked]
    done = answers.count(DONE)
    assert 0 < done < len(asked) and all(said.startswith("[queue_full]") for said in answers[done:])


def test_a_model_that_is_unloaded_ends_its_command_and_answers_those_that_wait(model, hold):
    asked = run_first(model, hold, request(), request())
    ending = threading.Thread(target=model.finalize)
    ending.start()
    eventually(lambda: model._closing.is_set())
    hold.open()
    ending.join(PATIENCE)
    assert not ending.is_alive()
    assert [answer(one).partition("]")[0] for one in asked] == ["[capacity", "[draining", "[draining"]


@pytest.mark.parametrize(("variable", "value"), [("HPLM_ADMIN_KEY", ""), ("HPLM_ADMIN_KEY", " \n"), ("HPLM_STATE", "")])
def test_it_needs_a_key_and_a_state(opened, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(HplmError, match=mentioning("HPLM_ADMIN_KEY", "HPLM_STATE")), opened:
        raise AssertionError("it has loaded")
