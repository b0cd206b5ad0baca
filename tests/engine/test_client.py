"""The engine in a process of its own: its answers are the same, and whatever happens to it, every request is answered once."""

import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hplm.engine import encoder_client as own
from hplm.engine import worker
from hplm.engine.channel import DEVICE_FAILED
from hplm.engine.in_flight import read
from hplm.engine.memory import LARGE
from hplm.errors import Broken, Draining, Internal, OutOfCapacity, error_in
from hplm.metrics import names
from hplm.request.answers import size_of
from hplm.tenants import quarantine
from testing.toy import WORDS
from tests.engine.client import Client
from tests.support.message import mentioning
from tests.support.message import mentions as names_of
from tests.support.wait import PATIENCE, eventually, stop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(toy):
    client = Client(toy.folder)
    yield client
    client.close()


def test_requests_that_were_answered_together_get_their_own_answers(client):
    texts = [[WORDS[number + more] for more in range(1 + number % 3)] for number in range(12)]
    alone = [client.wait(client.ask("acme", own))["LOGITS"] for own in texts]
    stop(client.pid)
    held = [client.ask("acme", own) for own in texts]
    os.kill(client.pid, signal.SIGCONT)
    for asked, expected in zip(held, alone, strict=True):
        np.testing.assert_allclose(client.wait(asked)["LOGITS"], expected, atol=1e-4)


def test_requests_of_an_engine_that_is_killed_are_answered_and_the_next_engine_serves(client):
    """Before the system has ended it: a process that waits for a driver or a disk outlives SIGKILL."""
    before = client.wait(client.ask("acme", [WORDS[0]]))
    pid, ended, late, process = client.pid, threading.Event(), [], client.workers.current.process
    wait = process.wait
    process.wait = lambda timeout=None: late.append(not ended.wait(PATIENCE)) or wait(timeout)
    stop(pid)
    held = [client.ask("acme", [WORDS[0]] * 3) for _ in range(40)]
    os.kill(pid, signal.SIGKILL)
    told = [answer for answer in map(client.wait, held) if not isinstance(answer, dict)]
    assert not late, "they waited for the end of the process"
    ended.set()
    assert told and all(status == Draining.status and "[draining]" in message for status, message in told)
    after = client.ask_until_served("acme", [WORDS[0]])
    np.testing.assert_array_equal(after["LABEL"], before["LABEL"])
    assert client.pid != pid
    assert client.meter.take()[0][names.ENGINE_RESTARTS, ()] >= 1


def test_an_engine_that_does_not_move_is_ended(client, monkeypatch):
    client.wait(client.ask("acme", [WORDS[0]]))
    stop(client.pid)
    asked = client.ask("acme", [WORDS[0]])
    with monkeypatch.context() as patience:  # not before the signal: a busy machine may let an engine wait for its turn
        patience.setattr(worker, "BEATLESS_SECONDS", 0.0)
        status, message = client.wait(asked)
    assert status == Draining.status and "[draining]" in message
    client.ask_until_served("acme", [WORDS[0]])


def test_a_pause_of_all_processes_ends_no_engine(client, monkeypatch):
    """After it the clock is ahead, and the watching thread may be the first one that runs."""
    client.ask_until_served("acme", [WORDS[0]])
    engine = client.workers.current
    with monkeypatch.context() as paused:
        paused.setattr(worker, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1000))
        client.workers.look()
        client.workers.check()
    assert isinstance(client.wait(client.ask("acme", [WORDS[0]])), dict) and client.workers.current is engine


def test_requests_of_an_engine_that_cannot_be_killed_are_answered(client, monkeypatch):
    """A process that waits for a driver or a disk keeps its end of the socket open."""
    client.ask_until_served("acme", [WORDS[0]])
    process = client.workers.current.process
    monkeypatch.setattr(process, "kill", lambda: None)
    stop(process.pid)
    asked = client.ask("acme", [WORDS[0]])
    with monkeypatch.context() as patience:
        patience.setattr(worker, "BEATLESS_SECONDS", 0.0)
        assert word_in(client.wait(asked)) == "draining"
    before = client.meter.take()[0].get((names.LOST_REQUESTS, ("draining",)), 0)
    assert before >= 1
    eventually(lambda: client.pid is None)
    assert word_in(client.wait(client.ask("acme", [WORDS[0]]))) == "draining"  # there is no engine
    assert client.meter.take()[0][names.LOST_REQUESTS, ("draining",)] == 1
    os.kill(process.pid, signal.SIGKILL)
    client.ask_until_served("acme", [WORDS[0]])


def test_what_fails_while_an_engine_is_ended_does_not_end_the_thread_that_starts_the_next_one(client, monkeypatch):
    client.ask_until_served("acme", [WORDS[0]])
    engine = client.workers.current
    monkeypatch.setattr(engine.process, "wait", lambda: 1 // 0)
    os.kill(engine.process.pid, signal.SIGKILL)
    client.ask_until_served("acme", [WORDS[0]])
    assert client.workers.current is not engine


def test_who_receives_sleeps_until_something_comes(client):
    """An idle engine says something once a second."""
    comes, polls = iter([[], [None]]), []
    bell = SimpleNamespace(poll=lambda *timeout: polls.append(timeout))
    client.own._receive(SimpleNamespace(bell=bell, channel=SimpleNamespace(arrived=lambda: next(comes))))
    assert polls == [(), ()]


class Waiting:
    """A request whose `submit` runs in a thread of its own, and notes in which order what happens to it."""

    def __init__(self, client, **how):
        self.events = []
        ask = {"defer": lambda: self.events.append("deferred"), "sending": self._answered, **how}
        self._own = threading.Thread(target=lambda: setattr(self, "answers", client.ask("acme", [WORDS[0]], **ask)))
        self._own.start()

    def _answered(self):
        self.events.append("returned" if threading.current_thread() is self._own else "sent")

    def submitted(self):
        self._own.join(300)
        return self.answers


@pytest.fixture
def patient(client, monkeypatch):
    """A client that waits for ever for answers, as if they came soon."""
    client.ask_until_served("acme", [WORDS[0]])
    eventually(lambda: not client.own._held)
    monkeypatch.setattr(own, "SOON_SECONDS", 1e6)
    return client


def test_what_is_answered_soon_is_returned(patient):
    asked = Waiting(patient)
    assert isinstance(asked.submitted()[0], dict) and asked.events == ["returned"]


@pytest.mark.parametrize("why", ["late", "deadline", "slow"])
def test_what_is_not_answered_soon_is_deferred_and_then_answered_once(patient, monkeypatch, why):
    if why == "late":
        monkeypatch.setattr(own, "SOON_SECONDS", 0.004)
    if why == "slow":
        monkeypatch.setattr(patient.own, "_took_s", 2e6)
    stop(patient.pid)
    asked = Waiting(patient, allowed_s=0.004 if why == "deadline" else 0.0)
    answers = asked.submitted()
    assert not answers and asked.events == ["deferred"]
    os.kill(patient.pid, signal.SIGCONT)
    patient.wait(answers)
    assert asked.events == ["deferred", "sent"]


def test_behind_a_request_that_is_deferred_others_are_returned(patient):
    stop(patient.pid)
    first = Waiting(patient, allowed_s=0.004)
    assert not first.submitted() and first.events == ["deferred"]
    behind = Waiting(patient)
    eventually(lambda: len(patient.own._held) == 2)
    os.kill(patient.pid, signal.SIGCONT)
    assert isinstance(behind.submitted()[0], dict) and behind.events == ["returned"]
    patient.wait(first.answers)
    assert first.events == ["deferred", "sent"]


def test_an_engine_that_ends_while_its_answer_is_waited_for_is_answered_for_at_once(patient):
    pid = patient.pid
    stop(pid)
    asked = Waiting(patient)
    eventually(lambda: patient.own._held)
    os.kill(pid, signal.SIGKILL)
    assert word_in(patient.wait(asked.submitted())) == "draining" and asked.events == ["deferred", "sent"]
    patient.ask_until_served("acme", [WORDS[0]])


def test_a_message_that_cannot_be_read_while_it_is_waited_for_ends_the_engine(patient, monkeypatch):
    pid = patient.pid
    channel = patient.workers.current.channel
    arrived = channel.arrived
    monkeypatch.setattr(channel, "arrived", lambda wait_s=0.0: arrived(wait_s) and 1 // 0)
    asked = Waiting(patient)
    assert word_in(patient.wait(asked.submitted())) == "draining" and asked.events == ["deferred", "sent"]
    patient.ask_until_served("acme", [WORDS[0]])
    assert patient.pid != pid


def test_requests_that_cannot_be_passed_on_are_answered(patient, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(patient.workers.current.channel, "send_bytes", lambda parts: bytearray(1 << 62))
        asked = Waiting(patient)
        assert word_in(asked.submitted()[0]) == "capacity" and asked.events == ["returned"]
    assert isinstance(Waiting(patient).submitted()[0], dict)


def test_closing_answers_what_is_waited_for(toy, monkeypatch):
    monkeypatch.setattr(own, "SOON_SECONDS", 1e6)
    client = Client(toy.folder)
    stop(client.pid)
    asked = Waiting(client)
    eventually(lambda: client.own._held)
    closing = threading.Thread(target=client.close)
    closing.start()
    eventually(lambda: client.workers._closing.is_set())
    os.kill(client.pid, signal.SIGCONT)
    closing.join(300)
    assert isinstance(asked.submitted()[0], dict) and asked.events == ["returned"]


class Clock:
    """The clock of a client. A thread can move its own time forward."""

    def __init__(self):
        self._thread = threading.local()

    monotonic = staticmethod(time.monotonic)

    def monotonic_ns(self):
        return time.monotonic_ns() + getattr(self._thread, "ahead_ns", 0)

    def pass_two_minutes(self):
        self._thread.ahead_ns = 120 * 10**9


def test_each_request_is_counted_once_by_what_its_client_got(toy, monkeypatch):
    """Also if its engine ends before it says anything. Takes seconds: one answer needs shared memory of its own."""
    clock, large = Clock(), [" ".join(WORDS[:60])] * 1300
    monkeypatch.setattr(own, "time", clock)
    client = Client(toy.folder)
    unsent = client.wait(client.ask("beta", large, OutOfCapacity("no shared memory")))
    assert size_of(unsent) >= LARGE
    for texts, how in (
        ([WORDS[0]], {}), ([WORDS[0]] * 2, {"allowed_s": 60.0}),
        ([WORDS[0]] * 2, {"allowed_s": 60.0, "sending": clock.pass_two_minutes}),
    ):  # fmt: skip
        client.wait(client.ask("beta", texts, **how))
    series = ((names.REQUESTS.name, client.backbone.view.snapshot.find("beta").domain), (names.TENANT_REQUESTS.name, "beta"))
    outcomes = ("answered", "capacity", "on_time", "late")
    expected, counts = Counter((*one, outcome) for one in series for outcome in outcomes), Counter()

    def counted():
        for (metric, labels), count in client.counts().items():
            if metric in (names.REQUESTS, names.TENANT_REQUESTS):
                counts[(metric.name, *labels)] += count
        return {one: count for one, count in counts.items() if count} == expected

    stop(client.pid)  # nothing that it says is needed
    eventually(counted)
    os.kill(client.pid, signal.SIGCONT)
    shown = [client.own.outcomes[0].keeps((names.TENANT_REQUESTS, (tenant, "answered"))) for tenant in ("beta", "", "nobody")]
    assert shown == [True, True, False]
    client.close()


def test_an_engine_that_cannot_be_made_is_an_error_with_its_reason(toy, monkeypatch, idle):
    with pytest.raises(Broken, match=mentioning("does not start", "'abacus'")):
        Client(toy.folder, device="abacus")
    monkeypatch.setattr(worker, "_python", lambda: idle)
    monkeypatch.setattr(worker, "START_SECONDS", 0.5)
    with pytest.raises(Broken, match=mentioning("does not start", "SIGKILL")):
        Client(toy.folder)


FAILS_ONCE = """#!{python}
import sys
from pathlib import Path
from hplm.engine import child
from hplm.engine.engine import Engine

def fail(engine, batch):
    raise RuntimeError("CUDA error: unspecified launch failure")

if not Path("{marker}").exists():
    Path("{marker}").touch()
    Engine.run = fail
sys.argv = sys.argv[2:]
child.main()
"""


def test_an_engine_whose_device_fails_ends_and_the_next_engine_serves(toy, monkeypatch, tmp_path, caplog):
    """Without a GPU: its engine raises what torch raises for one."""
    program = tmp_path / "engine"
    program.write_text(FAILS_ONCE.format(python=sys.executable, marker=tmp_path / "failed"))
    program.chmod(0o755)
    monkeypatch.setattr(worker, "_python", lambda: str(program))
    client = Client(toy.folder)
    assert word_in(client.wait(client.ask("acme", [WORDS[0]]))) == "crashed"
    client.ask_until_served("acme", [WORDS[0]])
    waiting = [client.ask("acme", [" ".join(WORDS[:20])] * 5) for _ in range(30)]
    client.close()
    assert all(isinstance(answers[0], dict) for answers in waiting)
    assert names_of(caplog.text, DEVICE_FAILED)
    assert client.meter.take()[0][names.ENGINE_RESTARTS, ()] == 1


POISONED = """#!{python}
import os, signal, sys, time
from pathlib import Path
from hplm.engine import child
from hplm.engine.engine import Engine

run, gate = Engine.run, Path("{gate}")

def run_or_end(engine, batch):
    ids = {{text.request.id for text in batch.texts}}
    if "poison" in ids:
        os.kill(os.getpid(), signal.SIGKILL)
    while "gate" in ids and not gate.exists():
        time.sleep(0.01)
    return run(engine, batch)

Engine.run = run_or_end
sys.argv = sys.argv[2:]
child.main()
"""


def test_a_request_that_ends_the_engine_does_so_twice_and_others_are_served(toy, monkeypatch, tmp_path, caplog):
    """Takes seconds: four processes start."""
    gate, program = tmp_path / "gate", tmp_path / "engine"
    program.write_text(POISONED.format(python=sys.executable, gate=gate))
    program.chmod(0o755)
    monkeypatch.setattr(worker, "_python", lambda: str(program))
    monkeypatch.setattr(quarantine, "FOLDER", tmp_path)
    client = Client(toy.folder)

    def computed():
        return {mark.tenant_id for mark in read(client.workers.current.batches)}

    # The engine ends while one batch is computed, one is staged, and one request waits.
    crashed = [client.ask("city", [WORDS[0]], id="gate")]
    eventually(lambda: computed() == {"city"})
    crashed.append(client.ask("acme", [WORDS[0]], id="poison"))
    eventually(lambda: computed() == {"city", "acme"})
    waited = client.ask("beta", [WORDS[0]])
    os.kill(client.pid, signal.SIGKILL)
    assert [word_in(client.wait(answers)) for answers in (*crashed, waited)] == ["crashed", "crashed", "draining"]
    gate.touch()

    # It is asked again and again, with others beside it.
    others = []
    words = [""]
    while words[-1] != "quarantined":
        client.ask_until_served("beta", [WORDS[0]])
        others += [client.ask(tenant, [WORDS[0]]) for tenant in ("beta", "city") for _ in range(5)]
        words.append(word_in(client.wait(client.ask("acme", [WORDS[0]], id="poison"))))
    assert words == ["", "crashed", "quarantined"]
    assert {word_in(client.wait(answers)) for answers in others} <= {None, "draining"}  # not one of them was computed beside it
    assert isinstance(client.wait(client.ask("beta", [WORDS[0]])), dict)
    counts, levels = client.meter.take()
    assert counts[names.ENGINE_RESTARTS, ()] == 2
    assert counts[names.LOST_REQUESTS, ("crashed",)] == 3
    assert levels[names.QUARANTINED_TENANTS, ()] == 1
    client.wait(client.ask("acme", [WORDS[0]]))
    eventually(lambda: (names.TENANT_REQUESTS, ("acme", "quarantined")) in client.counts())

    # Its file outlives the process.
    client.close()
    client = Client(toy.folder)
    assert word_in(client.wait(client.ask("acme", [WORDS[0]]))) == "quarantined"
    assert quarantine.release("acme", toy.repository) == ["toy"]
    client.ask_until_served("acme", [WORDS[0]])
    client.close()


def word_in(answer):
    """Returns the word of an error, None for an answer."""
    return None if isinstance(answer, dict) else error_in(answer[1]).word


@pytest.mark.parametrize("damage, word", [("memory", "crashed"), ("separation", "draining")])
def test_whatever_is_wrong_with_the_notes_of_an_engine_its_requests_are_answered(client, monkeypatch, damage, word):
    client.wait(client.ask("acme", [WORDS[0]]))
    stop(client.pid)
    asked = client.ask("acme", [WORDS[0]])
    if damage == "memory":
        os.pwrite(client.workers.current.batches, b"\xff" * 16, 0)
    else:
        monkeypatch.setattr(client.own._separation, "ended", None)
    os.kill(client.pid, signal.SIGKILL)
    assert word_in(client.wait(asked)) == word
    client.ask_until_served("acme", [WORDS[0]])
    assert not client.own._separation.apart.alone


def test_an_engine_that_cannot_be_started_leaves_nothing_open_and_is_tried_again(client, monkeypatch):
    def opened():
        links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        return Counter(name for link in links for name in ("socket:", "memfd:hplm-batches") if name in link)

    def fail_once(*args, **options):
        monkeypatch.undo()
        raise RuntimeError("no more threads")

    before, pid = opened(), client.pid
    monkeypatch.setattr(worker.subprocess, "Popen", fail_once)
    os.kill(pid, signal.SIGKILL)
    client.ask_until_served("acme", [WORDS[0]])
    assert client.pid != pid and opened() == before


@pytest.fixture
def idle(tmp_path):
    """A program that never says anything."""
    program = tmp_path / "idle"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    return str(program)


def test_an_engine_that_never_comes_back_is_told_from_one_that_is_starting_and_closing_does_not_wait(toy, monkeypatch, idle):
    client = Client(toy.folder)
    client.workers.check()
    first = client.pid
    monkeypatch.setattr(worker, "_python", lambda: idle)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: client.pid is None and client.workers._newest.pid != first)
    with pytest.raises(Draining):
        client.workers.check()
    patience = client.workers._outage.patience
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + patience))
    with pytest.raises(Internal):
        client.workers.check()
    client.close()
    assert client.workers._newest.returncode == -signal.SIGKILL
