"""The upper half on a virtual clock, one step at a time, with faults where a test wants them.

A test offers, steps, fails and closes; what it gets are answers. Only this file and `stepped` know which classes do the work.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np

from hplm.adapters.layout import Layout
from hplm.engine.backbone import Backbone
from hplm.engine.request import Text
from hplm.engine.service import EncoderService
from hplm.engine.settings import EncoderSettings
from hplm.engine.sheets import StagedBatch
from hplm.errors import Broken, DeadlineMissed, Draining, HplmError, Internal, OutOfCapacity, QueueFull
from hplm.lookup.lookup import Lookup
from hplm.process.in_flight import read
from hplm.scheduling.scheduler import Scheduler
from testing.toy import WORDS
from tests.engine.asker import PARAMETERS
from tests.engine.stepped import FAULTS, SILENT, Failing, Line
from tests.support.wait import Clock

MS = 1_000_000


class World:
    """`limit`: the most texts that wait. `expected` returns the logits that a text of a tenant must get."""

    def __init__(self, folder, expected, limit=10, stages=(), **changes) -> None:
        self.clock = Clock(1000.0)
        self.limit, self.expected = limit, cache(expected)
        self.requests: list[weakref.ref] = []
        self.asked: list[tuple[str, list[str], int]] = []  # tenant, texts, due_ms
        self.answers: list[list] = []
        self.fault: str | None = None
        self.has_failed: set[str] = set()
        self.hurt: dict[int, set[type[HplmError]]] = {}  # the errors of requests whose texts were in a batch that failed
        self._halved: set[tuple[int, int]] = set()  # texts for which there was no memory in a larger batch
        self.has_places = False  # whether the rows and slots that a policy has chosen reach staging
        self.has_overlapped = False  # whether batches in several sheets were computed
        self.taken = 0  # requests that have not left
        self._served_until = 0  # requests that were taken before it closed
        self.closed = False
        self.meanwhile: Callable[[], object] = lambda: None  # while a batch computes
        self._shown = os.memfd_create("batches")
        parameters = {**PARAMETERS, "queue_texts": str(limit), "batch_tokens": "64", **changes}
        settings = replace(EncoderSettings.read(parameters), stages=stages)
        with patch("hplm.engine.service.Scheduler", self._made):
            self.service = EncoderService(
                folder, settings, device_failed=self._device_failed, shown=self._shown, now_ns=self.clock
            )
        self._served = served = self.service.served
        self._encoder = self.service.encoder
        steps = len(served.engine.stages) + served.engine.overlaps
        self.waiting: list[list[StagedBatch]] = [[] for _ in range(steps)]  # batches before each step of the engine
        self.names = ["prepare", *(f"compute {stage + 1}" for stage in range(len(self.waiting))), "expire"]
        served.engine, served.stager = Failing(served.engine, self), Failing(served.stager, self)
        served.instruments, served.quotas = Failing(served.instruments, self), Failing(served.quotas, self)
        self._backbone = Backbone(folder)
        self._lookup = Lookup(self._backbone)
        self._computing = None

    def _made(self, *given) -> Line:
        self._line = Line(Scheduler(*given), self)
        return self._line

    @property
    def cost(self):
        return self._line.cost

    # Faults.

    def passes(self, place: str, texts: Sequence[Text] = ()) -> str | None:
        """Fails if the next fault comes here, with these texts. Returns a fault that the caller has to make itself."""
        if self.fault is None or FAULTS[self.fault][0] != place:
            return None
        fault, self.fault = self.fault, None
        if fault not in SILENT:
            self.has_failed.add(fault)
            self._hurt(fault, texts[:1] if fault == "row" else texts)
        if (error := FAULTS[fault][1]) is not None:
            raise type(error)(*error.args)  # another one each time: it keeps the frames that it was raised in
        return fault

    def _hurt(self, fault: str, texts: Sequence[Text]) -> None:
        own = {(self._number(text), text.index) for text in texts}
        if fault.startswith("memory") and len(own) > 1 and not own & self._halved:
            self._halved |= own  # they are computed in halves, and nobody hears of it
        else:
            kinds = (OutOfCapacity,) if "memory" in fault else (Internal, Broken)
            for number, _ in own:
                self.hurt.setdefault(number, set()).update(kinds)

    def _device_failed(self) -> None:
        """The process would end now. Those in a batch are the suspects."""
        assert {*self._numbers(self._computing)} <= self.shown(staged=True)

    def shown(self, staged: bool) -> set[int]:
        """Returns the requests that an end of the engine would make suspects. `staged`: also those that do not compute yet."""
        return {entry.number for entry in read(self._shown, staged)}

    def _numbers(self, staged) -> Iterable[int]:
        return map(self._number, staged.texts)

    @staticmethod
    def _number(text: Text) -> int:
        return int(text.request.in_flight_entry.split()[0])

    # Reports of the parts.

    def computes(self, staged) -> None:
        self._computing = staged
        assert {*self._numbers(staged)} <= self.shown(staged=False), "a computed request is not shown"
        self.clock.sleep(0.01)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        self._computing = staged

    # Steps of a test.

    def offer(self, tenant: str, texts: list[str], due_ms: int = 0, priority: int = 0) -> int:
        """Returns the request's number. An HplmError is an answer."""
        view, number, now = self._backbone.view, len(self.asked), self.clock()
        of = view.snapshot.find(tenant)
        self.asked.append((tenant, texts, due_ms))
        self.answers.append(answers := [])

        def respond(answer):
            answers.append(
                answer.with_traceback(None) if isinstance(answer, Exception) else answer
            )  # else it keeps the request
            self.passes("respond")

        try:
            asked = {"deadline_ns": now + due_ms * MS if due_ms else 0, "priority": priority}
            form = self._lookup.resolve(view, of, texts, arrival_ns=now, **asked)
            form.number, form.id = number, f"request {number}"
            self.service.submit(form, respond)
        except HplmError as error:
            answers.append(error.with_traceback(None))
        return number

    def step(self, name: str) -> bool:
        """Does one step. Returns whether there was anything to do."""
        if name == "expire":
            before = len(self._line)
            self._encoder.expire()
            return len(self._line) < before
        if name == "prepare":
            if self.waiting[0]:
                return False
            try:
                prepared = self._encoder.prepare()
            except ZeroDivisionError:  # no batch was chosen, and the thread goes on
                return True
            self.waiting[0] += [prepared] if prepared is not None else []
            return prepared is not None
        stage = int(name.removeprefix("compute ")) - 1
        if not self.waiting[stage]:
            return False
        prepared = self.waiting[stage].pop(0)
        if self._encoder.compute(prepared, stage):
            self.waiting[stage + 1].append(prepared)
        return True

    def run_all(self) -> None:
        """Goes on until nothing is left to do. Time passes where somebody waits for it."""
        for _ in range(2000):
            if not any([self.step(name) for name in self.names]):
                if not len(self._line):
                    return
                self.clock.sleep(0.001)
        raise AssertionError(f"{len(self._line)} texts wait, and nothing is done")

    def close(self, is_stuck: bool = False) -> None:
        """`is_stuck`: no step is done any more until it has closed."""
        self.closed = True
        self._served_until = 0 if is_stuck else len(self.asked)
        self._encoder.close()
        if not is_stuck:
            self.run_all()
            assert self._encoder.is_drained
        self._encoder.abandon()
        self.service.close()

    def finish(self) -> None:
        """Answers what is left, and checks that each request has its one answer and nothing is held."""
        self.fault = None
        self.meanwhile = lambda: None
        self.run_all()
        if not self.closed:  # the slots of a computed batch are given back when the next one is staged
            self.offer("echo", [WORDS[0]])
            self.run_all()
            view = self._backbone.view
            own = Layout.of(view.snapshot.find("echo").weights.head.layout)
            held = {layout for layout, slots in self._served.stager.slots().items() if slots.pinned}
            assert held == {own}, "slots are held"
        assert self.taken == 0, "a request has left twice or never"
        assert [len(answers) for answers in self.answers] == [1] * len(self.answers)
        for number, ((tenant, texts, *_), (answer,)) in enumerate(zip(self.asked, self.answers, strict=True)):
            if isinstance(answer, Exception):
                assert isinstance(answer, self._reasons(number)), repr(answer)
            else:
                assert len(answer) == len(texts)
                for text, rows in zip(texts, answer, strict=True):
                    np.testing.assert_allclose(rows.logits, self.expected(tenant, text), atol=1e-3)
        assert not len(self._line) and not list(read(self._shown)) and not len(self._served.quotas)
        self._computing = None
        gc.collect()
        if not self.has_failed:  # the log keeps errors, and with them the requests
            assert not any(request() for request in self.requests), "a request is kept"

    def _reasons(self, number: int) -> tuple[type[HplmError], ...]:
        """Returns the errors that may be the answer to a request."""
        *_, due_ms = self.asked[number]
        return (
            QueueFull,
            *[DeadlineMissed] * (due_ms > 0),
            *[Draining] * (self.closed and number >= self._served_until),
            *self.hurt.get(number, ()),
        )

    def end(self) -> None:
        if not self.closed:
            self.close()
        os.close(self._shown)
