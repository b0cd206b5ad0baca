"""Probes, what their answers mean, and what is then done. Servers, models and the clock are played here."""

import json
from contextlib import nullcontext

import pytest

from hplm.cli.watch import ask
from hplm.errors import Draining, HplmError
from hplm.server import probing
from hplm.server.control import Control
from hplm.server.probing import Health, Probe, State
from hplm.server.supervisor import SILENT_SECONDS, Supervisor
from tests.support.message import mentioning, mentions
from tests.support.wait import Clock

BROKEN = Health(State.BROKEN, "[internal] the loop fails")
WORKS = Health(State.WORKS)
BUSY = Health(State.BUSY, Draining("the engine is being started again").wire())
REFUSED = Health(State.WORKS, "expected 2 inputs but got 1")
SILENT = Health(State.SILENT)


class Played(Clock):
    """A server with the model `chat`, and what controls it. Each answer to a probe takes a second. Others say nothing."""

    def __init__(self, *answers):
        super().__init__(1000.0)
        self.answers = list(answers)
        self.pid, self.id, self.models, self.restarts = None, "hplm-played", {"chat"}, 0
        self.unreadable, self.read = set(), []

    def wait(self, seconds):
        return None

    def see_states(self):
        pass

    limit_log = see_states

    def control(self):
        return self

    def loaded(self):
        return self.models

    def probes(self, models):
        if self.unreadable.intersection(models):
            raise HplmError("the configuration of the model cannot be read")
        self.read.extend(models)
        return dict.fromkeys(models, Probe("infer", b""))

    def probe(self, model, probe, timeout):
        self.seconds += 1
        return self.answers.pop(0) if model == "chat" else SILENT

    def start_again(self):
        self.restarts += 1
        self.models = {"chat"}


def supervised(*answers, **settings):
    """Returns the server, its supervisor, and what that will say."""
    played, said = Played(*answers), []
    vars(played).update(settings)
    return played, Supervisor(played, said.append, clock=played), said


@pytest.mark.parametrize(
    ("answers", "restarts"),
    [
        ([WORKS, *[BROKEN] * round(SILENT_SECONDS + 2)], 1),
        ([WORKS, *[BROKEN] * round(SILENT_SECONDS / 2)] * 4, 0),  # for a moment each
    ],
)
def test_a_server_is_started_again_if_a_model_of_it_stays_broken(answers, restarts):
    server, supervising, said = supervised(*answers)
    while server.answers:
        supervising.look()
    assert server.restarts == restarts and all(mentions(one, "chat", BROKEN.said) for one in said[:1])


def test_a_silent_model_that_was_loaded_later_does_not_end_the_supervisor():
    server, supervising, _ = supervised(*[WORKS] * 100)
    server.models = {"chat", "later", "last"}
    while not server.restarts:
        supervising.look()
    supervising.look()
    assert server.restarts == 1 and supervising.watched == ["chat"]


def test_a_model_whose_configuration_cannot_be_read_is_asked_as_soon_as_it_can():
    server, supervising, _ = supervised(*[WORKS] * 3, unreadable={"later"})
    server.models = {"chat", "later"}
    supervising.look()
    assert supervising.watched == ["chat"]
    server.unreadable = set()
    supervising.look()
    assert sorted(supervising.watched) == ["chat", "later"]


def test_a_server_whose_models_cannot_be_read_is_started_again():
    server, supervising, _ = supervised(unreadable={"chat"})
    supervising.look()
    assert not server.restarts
    server.seconds += SILENT_SECONDS + 1
    supervising.look()
    assert server.restarts == 1


def watched(how, played):
    """Watches until it ends, or raises an error about `chat`."""
    ask(played, "127.0.0.1:1", ["chat"], how == "once", how == "alive", 15.0, played)


@pytest.mark.parametrize(
    ("how", "answers", "named"),
    [
        ("once", [WORKS], None),
        ("once", [BROKEN], BROKEN.said),
        ("once", [BUSY], BUSY.said),  # alive, but not ready
        ("alive", [WORKS], None),
        ("alive", [BUSY], None),
        ("alive", [BROKEN], BROKEN.said),
        ("alive", [Health(State.DEAD, "Stub process")], "Stub process"),
        ("alive", [SILENT], SILENT.said),
        ("", [WORKS, BROKEN, BROKEN, WORKS, *[BROKEN] * 20], BROKEN.said),
    ],
)
def test_watching_says_whether_a_model_works(how, answers, named):
    with pytest.raises(HplmError, match=mentioning("chat", named)) if named is not None else nullcontext():
        watched(how, Played(*answers))


def test_a_probe_that_is_answered_with_an_error_is_made_again():
    """The model may have been loaded again with other inputs. Triton refuses the old probe, whether the model lives or not."""
    server, supervising, _ = supervised(WORKS, REFUSED, WORKS, WORKS)
    while server.answers:
        supervising.look()
    assert server.read == ["chat", "chat"] and not server.restarts
    played = Played(WORKS, REFUSED, WORKS, *[BROKEN] * 20)
    with pytest.raises(HplmError, match=mentioning(BROKEN.said)):
        watched("", played)
    assert played.read == ["chat", "chat"]


def test_a_probe_has_every_required_input_with_the_least_values():
    config = {
        "max_batch_size": 8,
        "input": [
            {"name": "TEXT", "data_type": "TYPE_STRING", "dims": ["1"]},
            {"name": "PAIR", "data_type": "TYPE_STRING", "dims": ["1"], "optional": True},
            {"name": "IDS", "data_type": "TYPE_INT64", "dims": ["-1", "2"]},
            {"name": "FLAG", "data_type": "TYPE_BOOL", "dims": ["1"]},
        ],
    }
    probe = probing.probe_of(config)
    assert probe.path == "infer"
    assert json.loads(probe.body) == {
        "parameters": {"hplm_probe": True},
        "inputs": [
            {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [""]},
            {"name": "IDS", "shape": [1, 1, 2], "datatype": "INT64", "data": [0, 0]},
            {"name": "FLAG", "shape": [1, 1], "datatype": "BOOL", "data": [False]},
        ],
    }
    assert json.loads(probing.probe_of({**config, "max_batch_size": 0}).body)["inputs"][1]["shape"] == [1, 2]
    optional = {"input": config["input"][1:2], "max_batch_size": 8}
    assert [one["name"] for one in json.loads(probing.probe_of(optional).body)["inputs"]] == ["PAIR"]
    generating = {"model_transaction_policy": {"decoupled": True}, "input": config["input"][:2]}
    assert probing.probe_of(generating) == probing.Probe("generate", b'{"hplm_probe": true, "TEXT": ""}')


@pytest.mark.parametrize(
    ("status", "said", "state"),
    [
        (200, "", State.WORKS),
        (404, "[no_tenant] no such tenant", State.WORKS),
        (500, "Failed to process the request(s): a model's own exception", State.WORKS),
        (503, "[draining] the engine is being started again", State.BUSY),
        (400, "[draining] the server is shutting down", State.BUSY),  # of `generate`
        (500, "[internal] the loop has failed 100 times in a row", State.BROKEN),
        (500, "[broken] a table does not match its checksum", State.BROKEN),
        (503, "[capacity] the device has no memory", State.BUSY),
        (500, "Stub process 'toy-lookup_0_0' is not healthy.", State.DEAD),
        (500, "", State.DEAD),
        (400, "Request for unknown model: 'toy' has no available versions", State.UNLOADED),
    ],
)
def test_what_an_answer_means(status, said, state):
    assert probing.health(status, json.dumps({"error": said}).encode() if said else b"").state is state


class Unread(Control):
    """A server that does not know its model's configuration."""

    def __init__(self):
        super().__init__("127.0.0.1", 1, {})
        self.asked = []

    def _ask(self, port, method, path, body=None, timeout=5.0):
        self.asked.append(path)
        return 400, b'{"error": "Request for unknown model: \'toy\' has no available versions"}'


def test_a_model_whose_configuration_cannot_be_read_has_no_probe_and_is_not_loaded_with_an_empty_one():
    """Triton would answer a probe without inputs, whether the model lives or not."""
    server = Unread()
    with pytest.raises(HplmError, match=mentioning("toy", 400, "no available versions")):
        server.probes(["toy"])
    server.asked.clear()
    assert not server.revive("toy") and server.asked == ["/v2/models/toy/config"]
