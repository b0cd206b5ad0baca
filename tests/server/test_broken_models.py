"""A model that answers probes, but says that it answers no request. Servers, models and the clock are played here."""

from types import SimpleNamespace

import pytest

from hplm.cli import watch
from hplm.errors import HplmError
from hplm.server import supervisor
from hplm.server.probing import Health, Probe, State
from hplm.server.supervisor import SILENT_SECONDS, Supervisor
from tests.naming import names, naming

BROKEN = Health(State.BROKEN, "[internal] the loop fails")
WORKS = Health(State.WORKS)


class Played:
    """A server with one model, and what controls it. Each answer to a probe takes a second."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.now = 1000.0
        self.pid, self.id, self.models, self.restarts = None, "hplm-played", {"chat"}, 0

    def wait(self, seconds):
        return None

    def limit_log(self):
        pass

    def control(self):
        return self

    def loaded(self):
        return self.models

    def probes(self, models):
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
    assert server.restarts == 1 and names(said[0], "chat", BROKEN.said)


def test_a_model_that_is_broken_for_a_moment_is_left_alone(monkeypatch):
    assert supervised(monkeypatch, *[WORKS, *[BROKEN] * round(SILENT_SECONDS / 2)] * 4)[0].restarts == 0


def watched(monkeypatch, once, *answers):
    played = Played(*answers)
    monkeypatch.setattr("hplm.server.control.Control", lambda host, port, admin: played)
    monkeypatch.setattr(watch, "time", played)
    watch.run(SimpleNamespace(url="127.0.0.1:1", models=["chat"], once=once, timeout=15.0))


def test_watching_fails_if_a_model_stays_broken(monkeypatch):
    with pytest.raises(HplmError, match=naming("chat", BROKEN.said)):
        watched(monkeypatch, True, BROKEN)
    with pytest.raises(HplmError, match=naming("chat", BROKEN.said)):
        watched(monkeypatch, False, WORKS, BROKEN, BROKEN, WORKS, *[BROKEN] * 20)
