"""The engine's process and its threads: what goes on while one is kept, what it is told, and how it ends."""

import os
import socket
import struct
import sys
import threading
import time
from contextlib import ExitStack
from queue import SimpleQueue

import pytest
import torch

from hplm.engine import worker
from hplm.engine.backbone import Backbone
from hplm.engine.channel import DEVICE_FAILED, Apart, Beat, Begin, Channel, End, request_parts
from hplm.engine.child import Child
from hplm.engine.encoder_client import EncoderClient
from hplm.engine.engine import Engine
from hplm.engine.lookup import MOST_CHARACTERS, Lookup, Reading
from hplm.engine.service import Service
from hplm.engine.settings import Settings
from hplm.engine.staging import Stager
from hplm.engine.threads import repeat
from hplm.errors import Broken, DeadlineMissed, Draining, QueueFull
from hplm.metrics.meter import Meter
from hplm.request.answers import replies_in
from testing.toy import WORDS
from tests.engine.asker import PARAMETERS, Asker, stages_of
from tests.support.message import mentioning
from tests.support.wait import PATIENCE, Hold, eventually

NAMES = {"prepare": (Stager, "stage"), "compute": (Engine, "run")}


@pytest.fixture
def hold(monkeypatch):
    """Returns what holds a step of all engines, from now on."""
    with ExitStack() as holds:

        def held(step):
            owner, name = NAMES[step]
            whole, own = getattr(owner, name), holds.enter_context(Hold())
            monkeypatch.setattr(owner, name, lambda *given: own.pass_through() or whole(*given))
            return own

        yield held


def test_a_request_divides_its_work_among_as_many_cores_as_it_is_told(toy):
    """`tests/test_way.py` shows that a lone request is answered by the thread that computes."""
    seen, before = [], torch.get_num_threads()

    class Noting(Asker):
        def answered(self, number, answer):
            seen.append(torch.get_num_threads())
            super().answered(number, answer)

    asker = Noting(toy.folder, threads="3")
    asker.wait(asker.ask("acme", [WORDS[0]]))
    asker.close()
    torch.set_num_threads(before)  # as later tests would have had it
    assert seen == [3]


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


@pytest.mark.parametrize("step", NAMES)
def test_who_waits_at_the_end_gets_an_answer_although_a_step_is_kept(toy, hold, step):
    held, asker = hold(step), Asker(toy.folder)
    numbers = [asker.ask("acme", [WORDS[0]])]
    held.until_reached()
    numbers.append(asker.ask("city", [WORDS[1]]))
    asker.process.close(drain_s=0.0)
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


class Modelled:
    """An engine in a thread of this process, and what its model process does with it."""

    def __init__(self, folder):
        ours, its = socket.socketpair()
        self.channel, self._shown = Channel(ours.detach()), os.memfd_create("batches")
        self._engine = threading.Thread(target=Child(Channel(its.detach()), self._shown).run)
        self._engine.start()
        self.channel.send(Begin([folder], {"backbone": "toy", **PARAMETERS}, None, Apart(frozenset(), (frozenset(),))))
        assert not self.channel.receive(PATIENCE).failure
        self._backbone = Backbone(folder)

    def ask(self, *numbers, cut=(), **more):
        """Sends requests together. The forms of some are cut."""
        view, parts = self._backbone.view, []
        for number in numbers:
            own = Reading(view, view.snapshot.find("acme"), [WORDS[0]], arrival_ns=time.monotonic_ns(), **more)
            (form,) = Lookup(self._backbone).read([own], MOST_CHARACTERS)
            parts += request_parts(number, 0, 1, "", form[:9] if number in cut else form)
        self.channel.send_bytes(parts)

    def failures(self, count):
        """Returns the failures of the next answers, by the number of their requests."""
        found = {}
        while len(found) < count:
            if isinstance(frame := self.channel.receive(PATIENCE), bytearray):
                found |= {number: reply.failure for reply in replies_in(frame) for number, _ in reply.requests}
        return found

    def end(self):
        self.channel.send(End())
        self._engine.join(PATIENCE)
        assert not self._engine.is_alive(), "it goes on"
        os.close(self._shown)


@pytest.fixture
def modelled(toy):
    modelled = Modelled(toy.folder)
    yield modelled
    modelled.end()


def test_an_error_while_counting_changes_no_heartbeat(modelled, monkeypatch, caplog):
    monkeypatch.setattr(Service, "look", lambda service, backbone: 1 / 0)
    eventually(lambda: "counted" in caplog.text)
    modelled.channel.arrived()
    beat = modelled.channel.receive(PATIENCE)
    assert isinstance(beat, Beat) and [beaten.counts for beaten in beat.backbones] == [{}]


def test_requests_do_not_wait_for_another_one_whose_snapshot_is_read(modelled, monkeypatch):
    reading, submit = Hold(), Service.submit
    monkeypatch.setattr(Service, "has_open", lambda service, form, backbone: not form.head.priority)
    monkeypatch.setattr(
        Service,
        "submit",
        lambda service, form, *given: (form.head.priority and reading.pass_through(), submit(service, form, *given)),
    )
    with reading:
        modelled.ask(2, priority=1)
        reading.until_reached()
        modelled.ask(1)
        assert modelled.failures(1) == {1: None}
    assert modelled.failures(1) == {2: None}


def test_a_form_that_cannot_be_read_fails_only_its_own_request(modelled):
    modelled.ask(1, 2, 3, cut=(2,))
    failures = modelled.failures(3)
    assert failures.pop(1) is failures.pop(3) is None and "[internal]" in failures.pop(2)[1]


def test_an_engine_whose_device_fails_ends_with_a_code_of_its_own(toy, monkeypatch):
    """Without a GPU: it raises what torch raises for one. `test_client_machine` ends engines as this one does."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)

    def run(engine, batch):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Engine, "run", run)
    modelled = Modelled(toy.folder)
    modelled.ask(1)
    eventually(lambda: codes)
    modelled.end()
    assert {*codes} == {DEVICE_FAILED}


@pytest.mark.slow
def test_an_engine_that_cannot_be_made_is_an_error_with_its_reason(toy, monkeypatch, tmp_path):
    """Takes seconds: two processes start."""

    def start(**changes):
        EncoderClient([toy.folder], {"backbone": "toy", **PARAMETERS, **changes}, None, [Meter()])

    with pytest.raises(Broken, match=mentioning("does not start", "'abacus'")):
        start(device="abacus")
    sleeps = tmp_path / f"python{sys.version_info.major}"
    sleeps.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeps.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(worker, "START_SECONDS", 0.5)
    with pytest.raises(Broken, match=mentioning("does not start", "SIGKILL")):
        start()
