"""Models that answer probes, but no requests, and what is then done. Servers, models and the clock are played here."""

from types import SimpleNamespace

import pytest

from hplm.cli import watch
from hplm.errors import Draining, HplmError
from hplm.server import supervisor
from hplm.server.probing import Health, Probe, State
from hplm.server.supervisor import SILENT_SECONDS, Supervisor
from tests.support.message import mentioning, mentions

BROKEN = Health(State.BROKEN, "[internal] the loop fails")
WORKS = Health(State.WORKS)
BUSY = Health(State.BUSY, Draining("the engine is being started again").wire())


class Played:
    """A server with the model `chat`, and what controls it. Each answer to a probe takes a second."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.now = 1000.0
        self.pid, self.id, self.models, self.restarts = None, "hplm-played", {"chat"}, 0
        self.unreadable, self.read = set(), []

    def wait(self, seconds):
        return None

    def see_states(self):
        pass

    def limit_log(self):
        pass

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
        self.now += 1
        return self.answers.pop(0)

    def start_again(self):
        self.restarts += 1

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def supervised(monkeypatch, *answers):
    """Returns the server after all answers, and what was said."""
    played, said = Played(*answers), []
    monkeypatch.setattr(supervisor, "time", played)
    supervising = Supervisor(played, said.append)
    while played.answers:
        supervising.look()
    return played, said


def test_a_server_is_started_again_if_a_model_of_it_stays_broken(monkeypatch):
    server, said = supervised(monkeypatch, WORKS, *[BROKEN] * round(SILENT_SECONDS + 2))
    assert server.restarts == 1 and mentions(said[0], "chat", BROKEN.said)


def test_a_model_that_is_broken_for_a_moment_is_left_alone(monkeypatch):
    assert supervised(monkeypatch, *[WORKS, *[BROKEN] * round(SILENT_SECONDS / 2)] * 4)[0].restarts == 0


def watched(monkeypatch, how, *answers, read=None):
    """`read` gets the models whose probes are made."""
    played = Played(*answers)
    played.read = [] if read is None else read
    monkeypatch.setattr("hplm.server.control.Control", lambda host, port, admin: played)
    monkeypatch.setattr(watch, "time", played)
    watch.run(SimpleNamespace(url="127.0.0.1:1", models=["chat"], timeout=15.0, once=how == "once", alive=how == "alive"))


def test_watching_fails_if_a_model_stays_broken(monkeypatch):
    with pytest.raises(HplmError, match=mentioning("chat", BROKEN.said)):
        watched(monkeypatch, "once", BROKEN)
    with pytest.raises(HplmError, match=mentioning("chat", BROKEN.said)):
        watched(monkeypatch, "", WORKS, BROKEN, BROKEN, WORKS, *[BROKEN] * 20)


def test_a_server_is_ready_only_if_every_model_answers(monkeypatch):
    watched(monkeypatch, "once", WORKS)
    with pytest.raises(HplmError, match=mentioning("chat", BUSY.said)):
        watched(monkeypatch, "once", BUSY)


def test_a_server_is_alive_while_a_model_says_that_it_will_answer_soon(monkeypatch):
    for health in (WORKS, BUSY):
        watched(monkeypatch, "alive", health)
    for health in (BROKEN, Health(State.DEAD, "Stub process"), Health(State.SILENT)):
        with pytest.raises(HplmError, match=mentioning("chat", health.said)):
            watched(monkeypatch, "alive", health)


class PlayedWithMore(Played):
    """A model that answers, and others that are loaded later and say nothing. A restart loads only the first one."""

    def probe(self, model, probe, timeout):
        self.now += 1
        return WORKS if model == "chat" else Health(State.SILENT)

    def start_again(self):
        super().start_again()
        self.models = {"chat"}


def test_a_silent_model_that_was_loaded_later_does_not_end_the_supervisor(monkeypatch):
    played, said = PlayedWithMore(), []
    monkeypatch.setattr(supervisor, "time", played)
    supervising = Supervisor(played, said.append)
    played.models = {"chat", "later", "last"}
    while not played.restarts:
        supervising.look()
    supervising.look()
    assert played.restarts == 1 and supervising.watched == ["chat"]


def test_a_model_whose_configuration_cannot_be_read_is_asked_as_soon_as_it_can(monkeypatch):
    played = Played(*[WORKS] * 3)
    played.unreadable = {"later"}
    monkeypatch.setattr(supervisor, "time", played)
    supervising = Supervisor(played, print)
    played.models = {"chat", "later"}
    supervising.look()
    assert supervising.watched == ["chat"]
    played.unreadable = set()
    supervising.look()
    assert sorted(supervising.watched) == ["chat", "later"]


def test_a_server_whose_models_cannot_be_read_is_started_again(monkeypatch):
    played, said = Played(), []
    played.unreadable = {"chat"}
    monkeypatch.setattr(supervisor, "time", played)
    supervising = Supervisor(played, said.append)
    supervising.look()
    assert not played.restarts
    played.now += SILENT_SECONDS + 1
    supervising.look()
    assert played.restarts == 1


def test_a_probe_that_is_answered_with_an_error_is_made_again(monkeypatch):
    """The model may have been loaded again with other inputs. Triton refuses the old probe, whether the model lives or not."""
    refused = Health(State.WORKS, "expected 2 inputs but got 1")
    played = Played(WORKS, refused, WORKS, WORKS)
    monkeypatch.setattr(supervisor, "time", played)
    supervising = Supervisor(played, print)
    while played.answers:
        supervising.look()
    assert played.read == ["chat", "chat"] and not played.restarts
    read = []
    with pytest.raises(HplmError, match=mentioning(BROKEN.said)):
        watched(monkeypatch, "", WORKS, refused, WORKS, *[BROKEN] * 20, read=read)
    assert read == ["chat", "chat"]
