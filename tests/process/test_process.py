"""The engine's process and its threads: what goes on while one is kept, what it is told, and how it ends."""

import math
import os
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from itertools import islice, pairwise
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from hplm.engine.backbone import Backbone
from hplm.engine.encoder_client import EncoderClient
from hplm.engine.service import EncoderService, open_service
from hplm.engine.settings import EncoderSettings
from hplm.errors import Broken, DeadlineMissed, Draining, Internal, QueueFull
from hplm.lookup import views
from hplm.lookup.lookup import Lookup, LookupRequest
from hplm.metrics.meter import Outcomes
from hplm.metrics.names import WAITING_TEXTS
from hplm.process import host
from hplm.process.channel import DEVICE_FAILED, Apart, Beat, Begin, Channel, Shutdown, request_parts
from hplm.process.driver import Driver
from hplm.process.worker import Workers
from hplm.request.answers import replies_in
from hplm.threads import repeat
from testing.toy import WORDS
from tests.engine.asker import PARAMETERS, Asker, stages_of
from tests.support.message import mentioning
from tests.support.wait import PATIENCE, Hold, eventually


class Held:
    """A part of an engine that is held at a step, which is in its last stage."""

    def __init__(self, whole, step, hold):
        self._whole, self._step, self._hold = whole, step, hold

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def stage(self, *given):
        self._at("stage")
        return self._whole.stage(*given)

    def run(self, batch, stage):
        if stage == len(self._whole.stages) - 1:
            self._at("run")
        return self._whole.run(batch, stage)

    def _at(self, step):
        if step == self._step:
            self._hold.pass_through()


@pytest.fixture
def hold():
    with Hold() as hold:
        yield hold


STEPS = ["stage", "run"]  # when a batch is staged, and when it is computed


def held_at(step, hold, *given, **changes):
    asker = Asker(*given, **changes)
    served = asker.service.served
    served.stager, served.engine = Held(served.stager, step, hold), Held(served.engine, step, hold)
    return asker


def test_a_request_divides_its_work_among_as_many_cores_as_it_is_told(toy):
    """`tests/test_way.py` shows that a lone request is answered by the thread that computes."""
    seen, before = set(), torch.get_num_threads()
    asker = Asker(toy.folder, threads="3")
    asker.service.served.engine.after_layers(lambda: seen.add(torch.get_num_threads()))
    asker.wait(asker.ask("acme", [WORDS[0]]))
    asker.close()
    torch.set_num_threads(before)  # as later tests would have had it
    assert seen == {3}


def test_a_thread_that_cannot_be_prepared_works_all_the_same(caplog):
    worked = threading.Event()
    repeat(lambda: worked.set() or False, "unlucky", lambda: 1 // 0).join()
    assert worked.is_set() and "unlucky" in caplog.text


@pytest.mark.parametrize("stages", [(), stages_of(0, 1)])
@pytest.mark.parametrize("step", STEPS)
def test_late_and_refused_requests_are_answered_while_a_step_is_kept(toy, hold, step, stages):
    asker = held_at(step, hold, toy.folder, stages=stages, slots="6", queue_texts="2", admission="false")
    first = asker.ask("acme", [WORDS[0]])
    hold.until_reached()
    for ahead in range(max(1, len(stages)) if step == "run" else 0):  # others are prepared, each in a batch of its own
        asker.ask("acme", [WORDS[0]])
        eventually(lambda chosen=ahead + 2: len(asker.service.encoder._scheduler._running) == chosen)
    late = asker.ask("acme", [WORDS[1]], deadline_ns=time.monotonic_ns() + 10**7)
    assert isinstance(asker.wait(late), DeadlineMissed) and not asker.answers[first]
    asker.ask("acme", [WORDS[2], WORDS[3]])  # all that may wait
    assert isinstance(asker.wait(asker.ask("acme", [WORDS[3]])), QueueFull)
    eventually(asker.driver.busy_since)
    hold.open()
    assert asker.wait(first)[0].labels
    eventually(lambda: not asker.driver.busy_since())
    asker.close()


@pytest.mark.parametrize("step", STEPS)
def test_who_waits_at_the_end_gets_an_answer_although_a_step_is_kept(toy, hold, step):
    asker = held_at(step, hold, toy.folder)
    numbers = [asker.ask("acme", [WORDS[0]])]
    hold.until_reached()
    numbers.append(asker.ask("city", [WORDS[1]]))
    asker.driver.close(drain_s=0.0)
    assert all(isinstance(asker.wait(number), Draining) for number in numbers)
    asker.driver.ended.wait()
    hold.open()
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
    asker.driver.close()
    for thread in threads:
        thread.join()
    asker.driver.join()
    asker.service.close()
    assert sorted(map(len, asker.answers)) == [0] * len(refused) + [1] * (120 - len(refused))


def test_each_batch_passes_all_stages_one_after_the_other():
    passed, left = defaultdict(list), iter(range(20))

    def compute(number, stage=0):
        passed[number].append(stage)
        return stage < 3

    nothing = dict.fromkeys(("expire", "close", "abandon"), lambda: None)
    engine = SimpleNamespace(
        wait_s=lambda: math.inf, prepare=lambda: next(left, None), compute=compute, is_drained=True, **nothing
    )
    driver = Driver(engine, starts=[lambda: None] * 4)
    driver.wake()
    eventually(lambda: [*passed.values()] == [[0, 1, 2, 3]] * 20)
    driver.close()
    driver.join()


def test_a_message_that_cannot_be_read_ends_the_engine(toy):
    """Its requests would never be answered."""
    service, said, (ours, its) = (
        EncoderService(toy.folder, EncoderSettings.read(PARAMETERS)),
        SimpleQueue(),
        socket.socketpair(),
    )
    engine = service.driven(Channel(its.detach()), said.put)
    ours.sendall(struct.pack("<Q?", 1, True) + b"?")
    assert said.get(timeout=PATIENCE) is None
    engine.close()
    engine.join()
    service.close()
    ours.close()


BEAT_S = 0.01


class Modelled:
    """An engine in a thread of this process, and what its model process does with it."""

    def __init__(self, folder, kind):
        """`kind`: the class of its service."""
        ours, its = socket.socketpair()
        self.channel, self._shown = Channel(ours.detach()), os.memfd_create("batches")
        self.codes = []  # with which it would have ended its process
        opened = partial(open_service, service=kind)
        engine = host.Host(Channel(its.detach()), self._shown, opened, BEAT_S, self.codes.append)
        self._engine = threading.Thread(target=engine.run)
        self._engine.start()
        self.channel.send(Begin(folder, PARAMETERS, None, Apart(frozenset(), frozenset())))
        assert not self.channel.receive(PATIENCE).failure
        self._backbone = Backbone(folder)

    def ask(self, *numbers, cut=(), **more):
        """Sends requests together. The forms of some are cut. `more`: what their heads say."""
        view, parts = self._backbone.view, []
        for number in numbers:
            own = LookupRequest(view, view.snapshot.find("acme"), [WORDS[0]])
            own.head = own.head._replace(arrival_ns=time.monotonic_ns(), **more)
            (form,) = Lookup(self._backbone).read([own])
            parts += request_parts(number, 1, "", form[:9] if number in cut else form)
        self.channel.send_bytes(parts)

    def failures(self, count):
        """Returns the failures of the next answers, by the number of their requests."""
        found = {}
        while len(found) < count:
            if isinstance(frame := self.channel.receive(PATIENCE), bytearray):
                found |= {number: reply.failure for reply in replies_in(frame) for number, _ in reply.requests}
        return found

    def beat(self):
        """Returns the next heartbeat."""
        while not isinstance(message := self.channel.receive(PATIENCE), Beat):
            assert message is not None, "no heart beats"
        return message

    def end(self):
        self.channel.send(Shutdown())
        self._engine.join(PATIENCE)
        assert not self._engine.is_alive(), "it goes on"
        assert {*self.codes} <= {DEVICE_FAILED}, "it has seen its model process go"
        os.close(self._shown)


def slow_to_open(hold):
    """Returns an engine that is held when it opens the generation that a request names."""

    class Slow(EncoderService):
        def submit(self, form, *given):
            if form.head.generation:
                hold.pass_through()
            super().submit(form, *given)

    return Slow


@pytest.fixture
def modelled_by(toy, monkeypatch):
    """Makes engines, each with a service of a class. No generation that a request names comes, and none is waited for."""
    monkeypatch.setattr(views, "OPENING_SECONDS", 0.0)
    made = []

    def make(kind):
        made.append(Modelled(toy.folder, kind))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.parametrize("look", [lambda meter: 1 / 0, lambda meter: meter.set(WAITING_TEXTS, threading.Lock())])
def test_an_error_while_counting_changes_no_heartbeat(modelled_by, look):
    """Nor does a count that cannot be pickled."""

    class Miscounting(EncoderService):
        def driven(self, *given):
            self.meter.look = partial(look, self.meter)
            return super().driven(*given)

    assert modelled_by(Miscounting).beat().counts == {}


@pytest.mark.parametrize("generation", [0, 1])
def test_beats_tell_of_a_thread_that_is_kept_and_count_no_pause_of_all_processes(modelled_by, generation):
    """They count themselves: after a pause a clock is ahead, and a beat may come before the thread has gone on."""
    with Hold() as hold:

        class Kept(slow_to_open(hold)):
            def __init__(self, *given):
                super().__init__(*given)
                self.served.engine.after_layers(hold.pass_through)

        modelled = modelled_by(Kept)
        modelled.ask(1, generation=generation)
        hold.until_reached()
        busy = (modelled.beat().busy_s / BEAT_S for _ in range(1000))  # those of before come first
        counted = (after - before == pytest.approx(1) for before, after in pairwise(busy))
        assert sum(islice(filter(None, counted), 30)) == 30


def test_requests_do_not_wait_for_another_one_whose_snapshot_is_read(modelled_by):
    with Hold() as reading:
        modelled = modelled_by(slow_to_open(reading))
        modelled.ask(2, generation=1)
        reading.until_reached()
        modelled.ask(1)
        assert modelled.failures(1) == {1: None}
    assert type(modelled.failures(1)[2]) is Draining


def test_a_form_that_cannot_be_read_fails_only_its_own_request(modelled_by):
    modelled = modelled_by(EncoderService)
    modelled.ask(1, 2, 3, cut=(2,))
    failures = modelled.failures(3)
    assert failures.pop(1) is failures.pop(3) is None and type(failures.pop(2)) is Internal


def test_an_engine_whose_device_fails_ends_with_a_code_of_its_own(modelled_by):
    """Without a GPU: it raises what torch raises for one. `test_client_machine` ends engines as this one does."""

    class Failing(EncoderService):
        def __init__(self, *given):
            super().__init__(*given)
            self.served.engine.after_layers(fail)

    def fail():
        raise RuntimeError("CUDA error: unspecified launch failure")

    modelled = modelled_by(Failing)
    modelled.ask(1)
    eventually(lambda: modelled.codes)
    assert {*modelled.codes} == {DEVICE_FAILED}


def test_an_engine_that_is_not_ready_in_time_is_ended(toy, monkeypatch, tmp_path):
    sleeps = tmp_path / f"python{sys.version_info.major}"
    sleeps.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeps.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    workers = partial(Workers, start_s=0.1)
    with pytest.raises(Broken, match=mentioning("does not start", "SIGKILL")):
        EncoderClient(toy.folder, PARAMETERS, None, Outcomes(), workers=workers)
