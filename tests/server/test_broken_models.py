"""Probes, what their answers mean, and what is then done. Servers, models and the clock are played here."""

import json
from contextlib import nullcontext

import pytest

from hplm.cli.watch import ask
from hplm.errors import Draining, HplmError
from hplm.server import probing
from hplm.server.control import Control
from hplm.server.probing import Health, ModelState, Probe
from hplm.server.supervisor import SILENT_SECONDS, Supervisor
from tests.support.message import mentioning, mentions
from tests.support.wait import Clock

BROKEN = Health(ModelState.BROKEN, "[internal] the loop fails")
WORKS = Health(ModelState.WORKS)
BUSY = Health(ModelState.BUSY, Draining("the engine is being started again").wire())
REFUSED = Health(ModelState.WORKS, "expected 2 inputs but got 1")
SILENT = Health(ModelState.SILENT)


class Played(Clock):
    """A server with the model `chat`, and what controls it. Each answer to a probe takes a second. Others say nothing."""

    def __init__(self, *answers, models=("chat",), unreadable=()):
        super().__init__(1000.0)
        self.answers = list(answers)
        self.group, self.id, self.models, self.restarts = None, "hplm-played", set(models), 0
        self.unreadable, self.read, self.said, self.asked = unreadable, [], [], set()

    def wait(self, seconds):
        return None

    def control(self):
        return self

    def loaded(self):
        return self.models

    def probes(self, models, parts=False):
        if set(self.unreadable).intersection(models):
            raise HplmError("the configuration of the model cannot be read")
        self.read.extend(models)
        return dict.fromkeys(models, Probe("infer", b""))

    def probe(self, model, probe, timeout):
        self.seconds += 1
        self.asked.add(model)
        return self.answers.pop(0) if model == "chat" else SILENT

    def start_again(self):
        self.restarts += 1
        self.models = {"chat"}

    def supervised(self):
        return Supervisor(self, self.said.append, clock=self)

    def watched(self, how=""):
        """Watches until it ends, or raises an error about `chat`."""
        ask(self, "127.0.0.1:1", ["chat"], how == "once", how == "alive", 15.0, self)


@pytest.mark.parametrize(("broken", "times", "restarts"), [(SILENT_SECONDS + 2, 1, 1), (SILENT_SECONDS / 2, 4, 0)])
def test_a_server_is_started_again_if_a_model_of_it_stays_broken(broken, times, restarts):
    server = Played(*[WORKS, *[BROKEN] * round(broken)] * times)
    supervising = server.supervised()
    while server.answers:
        supervising.look()
    assert server.restarts == restarts and all(mentions(one, "chat", BROKEN.reason) for one in server.said[:1])


def test_a_silent_model_that_was_loaded_later_does_not_end_the_supervisor():
    server = Played(*[WORKS] * 100)
    supervising = server.supervised()
    server.models = {"chat", "later", "last"}
    while not server.restarts:
        supervising.look()
    server.asked.clear()
    supervising.look()
    assert server.restarts == 1 and server.asked == {"chat"}


def test_a_model_whose_configuration_cannot_be_read_is_asked_as_soon_as_it_can():
    server = Played(*[WORKS] * 3, models=("chat", "later"), unreadable=("later",))
    supervising = server.supervised()
    supervising.look()
    assert server.asked == {"chat"}
    server.unreadable = ()
    supervising.look()
    assert server.asked == {"chat", "later"}


def test_a_server_whose_models_cannot_be_read_is_started_again():
    server = Played(unreadable=("chat",))
    supervising = server.supervised()
    supervising.look()
    assert not server.restarts
    server.seconds += SILENT_SECONDS + 1
    supervising.look()
    assert server.restarts == 1


@pytest.mark.parametrize(
    ("how", "answers", "named"),
    [
        ("once", [WORKS], None),
        ("once", [BUSY], BUSY.reason),  # alive, but not ready
        ("alive", [BUSY], None),
        ("alive", [BROKEN], BROKEN.reason),
        ("alive", [Health(ModelState.DEAD, "Stub process")], "Stub process"),
        ("alive", [SILENT], SILENT.reason),
        ("", [WORKS, BROKEN, BROKEN, WORKS, *[BROKEN] * 20], BROKEN.reason),
    ],
)
def test_watching_says_whether_a_model_works(how, answers, named, capsys):
    busy = answers[0] is BUSY
    with pytest.raises(HplmError, match=mentioning("chat", named)) if named is not None else nullcontext():
        Played(*answers).watched(how)
    assert mentions(capsys.readouterr().out, "chat", BUSY.reason) == (busy and how == "alive")


def test_a_probe_that_is_answered_with_an_error_is_made_again():
    """The model may have been loaded again with other inputs. Triton refuses the old probe, whether the model lives or not."""
    server = Played(WORKS, REFUSED, WORKS, WORKS)
    supervising = server.supervised()
    while server.answers:
        supervising.look()
    assert server.read == ["chat", "chat"] and not server.restarts
    server = Played(WORKS, REFUSED, WORKS, *[BROKEN] * 20)
    with pytest.raises(HplmError, match=mentioning(BROKEN.reason)):
        server.watched()
    assert server.read == ["chat", "chat"]


def test_a_probe_has_every_required_input_with_the_least_values():
    text, flag = {"name": "TEXT", "data_type": "TYPE_STRING", "dims": ["1"]}, {"name": "FLAG", "data_type": "TYPE_BOOL"}
    ids = {"name": "IDS", "data_type": "TYPE_INT64", "dims": ["-1", "2"]}
    pair = {**text, "name": "PAIR", "optional": True}
    config = {"max_batch_size": 8, "input": [text, pair, ids, {**flag, "dims": ["1"]}]}
    probe = probing.probe_of(config)
    assert probe.path == "infer" and json.loads(probe.body) == {
        "parameters": {"hplm_probe": True},
        "inputs": [
            {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [""]},
            {"name": "IDS", "shape": [1, 1, 2], "datatype": "INT64", "data": [0, 0]},
            {"name": "FLAG", "shape": [1, 1], "datatype": "BOOL", "data": [False]},
        ],
    }
    assert json.loads(probing.probe_of({**config, "max_batch_size": 0}).body)["inputs"][1]["shape"] == [1, 2]
    assert [one["name"] for one in json.loads(probing.probe_of({"input": [pair, pair]}).body)["inputs"]] == ["PAIR"]
    generating = {"model_transaction_policy": {"decoupled": True}, "input": [text, pair]}
    assert probing.probe_of(generating) == Probe("generate", b'{"hplm_probe": true, "TEXT": ""}')


@pytest.mark.parametrize(
    ("status", "said", "state"),
    [
        (200, "", ModelState.WORKS),
        (404, "[no_tenant] no such tenant", ModelState.WORKS),
        (500, "Failed to process the request(s): a model's own exception", ModelState.WORKS),
        (400, "[draining] the server is shutting down", ModelState.BUSY),  # of `generate`
        (500, "[internal] the loop has failed 100 times in a row", ModelState.BROKEN),
        (500, "[broken] a table does not match its checksum", ModelState.BROKEN),
        (503, "[capacity] the device has no memory", ModelState.BUSY),
        (500, "Stub process 'toy-lookup_0_0' is not healthy.", ModelState.DEAD),
        (500, "", ModelState.DEAD),
        (400, "Request for unknown model: 'toy' has no available versions", ModelState.UNLOADED),
    ],
)
def test_what_an_answer_means(status, said, state):
    assert probing.health(status, json.dumps({"error": said}).encode() if said else b"").state is state


def test_an_ensemble_has_no_probe_but_those_of_its_parts():
    configs = {name: {"input": []} for name in ("toy-lookup", "toy-upper")}
    configs["toy"] = {"platform": "ensemble", "ensemble_scheduling": {"step": [{"model_name": name} for name in configs]}}

    class Read(Control):
        def config(self, model):
            return configs[model]

    control = Read("127.0.0.1", 1, {})
    assert not control.probes(["toy"]) and list(control.probes(["toy"], parts=True)) == ["toy-lookup", "toy-upper"]


def test_a_model_whose_configuration_cannot_be_read_has_no_probe_and_is_not_loaded_with_an_empty_one():
    """Triton would answer a probe without inputs, whether the model lives or not."""
    asked = []

    class Unread(Control):
        def _ask(self, method, path, *_):
            asked.append(path)
            return 400, b'{"error": "Request for unknown model: \'toy\' has no available versions"}'

    with pytest.raises(HplmError, match=mentioning("toy", 400, "no available versions")):
        Unread("127.0.0.1", 1, {}).probes(["toy"])
    asked.clear()
    assert not Unread("127.0.0.1", 1, {}).revive("toy") and asked == ["/v2/models/toy/config"]
