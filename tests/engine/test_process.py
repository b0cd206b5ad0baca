"""The threads around an encoder: who does what for a lone request, and what goes on while a thread is kept."""

import socket
import struct
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hplm.engine import process
from hplm.engine.channel import Beat, Channel, End, request_parts
from hplm.engine.child import Child
from hplm.engine.engine import Engine
from hplm.engine.outbox import Outbox
from hplm.engine.service import Service
from hplm.engine.settings import Settings
from hplm.engine.staging import Stager
from hplm.engine.threads import repeat
from hplm.errors import DeadlineMissed, Draining, QueueFull
from hplm.request.answers import replies_in
from hplm.request.form import Head, write
from testing.toy import WORDS
from tests.engine.asker import PARAMETERS, Asker, stages_of
from tests.support.wait import PATIENCE, Hold, eventually

NAMES = {"prepare": (Stager, "stage"), "compute": (Engine, "run")}


@pytest.fixture
def hold(monkeypatch):
    """Returns what holds a step of all engines, from now on."""
    holds = []

    def held(step):
        owner, name = NAMES[step]
        whole, own = getattr(owner, name), Hold()
        holds.append(own)
        monkeypatch.setattr(owner, name, lambda *given: own.pass_through() or whole(*given))
        return own

    yield held
    for one in holds:
        one.open()


@pytest.fixture
def same_threads():
    """Gives later tests the threads that they would have had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("same_threads")
def test_one_thread_does_everything_for_a_lone_request_and_divides_its_work_among_the_cores(toy, monkeypatch):
    monkeypatch.setattr(process, "HELP_SECONDS", 600.0)  # whatever else the machine does
    seen = set()
    for owner, name in (*NAMES.values(), (Asker, "answered")):
        whole = getattr(owner, name)

        def noting(*given, whole=whole):
            seen.add((threading.current_thread().name, torch.get_num_threads()))
            return whole(*given)

        monkeypatch.setattr(owner, name, noting)
    asker = Asker(toy.folder, threads="3")
    for tenant in ("acme", "city"):
        asker.wait(asker.ask(tenant, [WORDS[0]]))
    assert seen == {("compute 1", 3)}
    asker.close()


def test_a_thread_that_cannot_be_prepared_works_all_the_same(caplog):
    worked = threading.Event()
    repeat(lambda: worked.set() or False, "unlucky", lambda: 1 // 0).join()
    assert worked.is_set() and "unlucky" in caplog.text


@pytest.mark.parametrize("stages", [(), stages_of(0, 1)])
@pytest.mark.parametrize("step", NAMES)
def test_late_and_refused_requests_are_answered_while_a_step_is_kept(toy, hold, step, stages):
    held, asker = hold(step), Asker(toy.folder, stages=stages, slots="6", queue_texts="2", admission="false")
    first = asker.ask("acme", [WORDS[0]])
    held.until_reached()
    for ahead in range(max(1, len(stages)) if step == "compute" else 0):  # others are prepared, each in a batch of its own
        asker.ask("acme", [WORDS[0]])
        eventually(lambda chosen=ahead + 2: len(asker.service.encoder._open) == chosen)
    late = asker.ask("acme", [WORDS[1]], deadline_ns=time.monotonic_ns() + 10**7)
    assert isinstance(asker.wait(late), DeadlineMissed) and not asker.answers[first]
    asker.ask("acme", [WORDS[2], WORDS[3]])  # all that may wait
    with pytest.raises(QueueFull):
        asker.ask("acme", [WORDS[3]])
    asker.answers.pop()
    eventually(lambda: asker.process.busy_s)
    held.open()
    assert asker.wait(first)[0].labels
    eventually(lambda: not asker.process.busy_s)
    asker.close()


def test_the_next_batch_is_prepared_while_one_computes(toy, hold):
    held, asker = hold("compute"), Asker(toy.folder)
    first = asker.ask("acme", [WORDS[0]])
    held.until_reached()
    prepare = hold("prepare")
    second = asker.ask("city", [WORDS[1]])
    prepare.until_reached()
    prepare.open()
    held.open()
    assert asker.wait(first)[0].labels and asker.wait(second)[0].labels
    asker.close()


@pytest.mark.parametrize("step", NAMES)
def test_who_waits_at_the_end_gets_an_answer_although_a_step_is_kept(toy, hold, step, monkeypatch):
    monkeypatch.setattr(process, "DRAIN_SECONDS", 0.0)
    held, asker = hold(step), Asker(toy.folder)
    numbers = [asker.ask("acme", [WORDS[0]])]
    held.until_reached()
    numbers.append(asker.ask("city", [WORDS[1]]))
    asker.process.close()
    assert all(isinstance(asker.wait(number), Draining) for number in numbers)
    asker.process.ended.wait()
    held.open()
    asker.close()


@pytest.mark.parametrize("stages", [(), stages_of(0, 1)])
def test_each_request_of_many_threads_gets_one_answer_while_it_closes(toy, stages):
    asker = Asker(toy.folder, stages=stages, slots="6", queue_texts="20")
    refused = []

    def ask(tenant):
        for number in range(40):
            try:
                asker.ask(tenant, [WORDS[number]], deadline_ns=(number % 3 == 0) * (time.monotonic_ns() + 10**8))
            except (Draining, QueueFull, DeadlineMissed):
                refused.append(number)

    threads = [threading.Thread(target=ask, args=(tenant,)) for tenant in ("acme", "beta", "city")]
    for thread in threads:
        thread.start()
    eventually(lambda: len(asker.answers) > 20)
    asker.process.close()
    for thread in threads:
        thread.join()
    asker.process.join()
    asker.service.close()
    assert sorted(map(len, asker.answers)) == [0] * len(refused) + [1] * (120 - len(refused))


def test_a_message_that_cannot_be_read_ends_the_engine(toy):
    """Its requests would never be answered."""
    service, said, (ours, its) = Service([(toy.folder, Settings.read(PARAMETERS))]), SimpleQueue(), socket.socketpair()
    engine = service.driven(Channel(its.detach()), said.put)
    ours.sendall(struct.pack("<Q?", 1, True) + b"?")
    assert said.get(timeout=PATIENCE) is None
    engine.close()
    engine.join()
    service.close()
    ours.close()


class Sent(list):
    """A channel that keeps what is sent."""

    send = list.append


def _child(**service):
    child = Child(Sent(), -1)
    child._service = SimpleNamespace(**service)
    child._process = SimpleNamespace(busy_s=0.5, wake=lambda: None, close=lambda: None)
    return child


def test_an_error_while_counting_changes_no_heartbeat(caplog):
    def look(backbone):
        if backbone == 0:
            raise ZeroDivisionError

    own = SimpleNamespace(instruments=SimpleNamespace(meter=SimpleNamespace(take=lambda: ({1: 1}, {2: 2}))))
    child = _child(served=[own, own], look=look)
    child._beat()
    (beat,) = child._channel
    assert isinstance(beat, Beat) and beat.computing_s == 0.5
    assert [bool(beaten.counts) for beaten in beat.backbones] == [False, True]
    assert "counted" in caplog.text


NONE = np.zeros(0, np.int64)


def form_of(generation):
    return write(b"", Head(0, generation, 0, 0, "law", "acme"), [0], [0], NONE, NONE, NONE)


def test_requests_do_not_wait_for_another_one_whose_snapshot_is_read():
    reading, submitted = Hold(), []

    def submit(form, *given):
        if form.head.generation == 2:
            reading.pass_through()
        submitted.append(form.head.generation)

    child = _child(has_open=lambda form, backbone: form.head.generation == 1, submit=submit)
    with reading:
        opener = threading.Thread(target=child._open_next)
        opener.start()
        child._take_in(bytearray().join(part for number in (2, 1) for part in request_parts(number, 0, 0, "", form_of(number))))
        reading.until_reached()
        assert submitted == [1]
    opener.join()
    assert submitted == [1, 2]


def test_a_form_that_cannot_be_read_fails_only_its_own_request():
    submitted, child = [], _child(has_open=lambda form, backbone: True, submit=lambda form, *given: submitted.append(form))
    child._outbox = Outbox(child._channel)
    child._channel.send_bytes = lambda parts: child._channel.append(bytearray().join(parts))
    good = form_of(1)
    requests = [(1, good), (2, good[:9]), (3, good)]
    child._take_in(bytearray().join(part for number, form in requests for part in request_parts(number, 0, 0, "", form)))
    ((reply,),) = [replies_in(frame) for frame in child._channel]
    assert len(submitted) == 2 and reply.requests == [(2, 1)] and "[internal]" in reply.failure[1]


def test_the_model_process_ends_the_engine():
    ended = []
    child = _child()
    child._process.close = lambda: ended.append(True)
    child._take_in(End())
    assert ended
