"""Times the ways of answering in this process, without a server: the engine's lookup and its upper half."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.measuring.cascade_traffic import IN_FLIGHT, Asked, Poisson, Sent
from bench.pipeline import Answered, saturated
from hplm.engine.backbone import Backbone
from hplm.engine.looked_up import LookedUp
from hplm.engine.lookup import Lookup
from hplm.engine.service import Service
from hplm.engine.settings import read_all
from hplm.errors import HplmError
from hplm.parameters import parameters_of
from hplm.tenants.models import upper_config
from hplm.tenants.ticket import Ticket

PATIENCE_S = 120.0
TASK = "classify"
SINGLE = 200  # texts, one after the other, for the share of the control logic


class Bare:
    """A service in this process."""

    def __init__(self, repository: Path, backbone: str, asked: Sequence[Asked]) -> None:
        folder = repository / backbone / "1"
        self.asked = asked
        self._backbone = Backbone(folder)
        self._lookup = Lookup(self._backbone)
        settings = read_all(parameters_of(upper_config(repository, backbone)))[backbone]
        self._service = Service([(folder, settings)])

    def close(self) -> None:
        self._service.close()

    def saturated(self, way: str, seconds: float) -> float:
        """Returns answers a second with so many requests in flight that the engine never waits."""

        def send(number: int, answered: Answered) -> None:
            self._send(way, self.asked[number % len(self.asked)], 0, answered)

        return saturated(send, IN_FLIGHT, seconds)

    def open_loop(self, ways: Sequence[str], load: Poisson, allowed: np.ndarray | None = None) -> Sent:
        """Sends requests when they are due. Where there are several ways, each text is asked in all, and waits for the last."""
        texts = len(load.due)
        missing, lock, over = np.full(texts, len(ways)), threading.Lock(), threading.Event()
        latencies = np.full(texts, np.inf)
        labels: list[str | None] = [None] * texts
        left = texts
        start = time.monotonic() + 0.1

        def answering(number: int) -> Callable[[list | Exception, tuple], None]:
            def answered(answer: list | Exception, counted: tuple) -> None:
                nonlocal left
                took = time.monotonic() - start - load.due[number]
                with lock:
                    missing[number] -= 1
                    if missing[number]:
                        return
                    if not isinstance(answer, Exception):
                        latencies[number], labels[number] = took, answer[0].labels[0]
                    left -= 1
                    if not left:
                        over.set()

            return answered

        for number, (due, text) in enumerate(zip(load.due.tolist(), load.asked.tolist(), strict=True)):
            time.sleep(max(0.0, start + due - time.monotonic()))
            deadline = round(1e9 * (start + due + allowed[number])) if allowed is not None else 0
            found = None
            for way in ways:
                answered = answering(number)
                try:
                    found = self._send(way, self.asked[text], deadline, answered, found, round(1e9 * (start + due)))
                except HplmError as error:  # refused
                    answered(error, ())
        if not over.wait(PATIENCE_S):
            raise HplmError(f"{left} of {texts} requests were not answered within {PATIENCE_S:.0f} s")
        return Sent(latencies, labels)

    def _send(
        self,
        way: str,
        asked: Asked,
        deadline_ns: int,
        answered: Callable[[list | Exception, tuple], None],
        found: LookedUp | None = None,
        arrival_ns: int = 0,
    ) -> LookedUp:
        view = self._backbone.view
        snapshot, tenant = view.snapshot, view.snapshot.find(asked.of(way))
        if found is None or (tenant.prunes and found.words is None):
            found = self._lookup.resolve(view, tenant, [asked.text], None, True)
        arrival_ns = arrival_ns or time.monotonic_ns()
        ticket = Ticket(snapshot.export_number, snapshot.generation, tenant.uid, tenant.version, arrival_ns, deadline_ns, 0, 0)
        self._service.submit(ticket, found, answered)
        return found
