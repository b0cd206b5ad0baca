"""An engine that runs in the test's own process and does what a test says, behind the real client of its process."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path

from hplm.engine.encoder_client import EncoderClient
from hplm.metrics.meter import Outcomes
from hplm.process.channel import Beat, Begin, Channel, Ready, Shutdown, requests_in
from hplm.process.client import Pending
from hplm.process.in_flight import InFlight, InFlightEntry
from hplm.process.worker import STUCK_SECONDS, Workers
from hplm.request.answers import Outputs, Reply, packed, strings
from hplm.request.form import TicketHead, read_head, write
from tests.support.wait import PATIENCE, Clock, eventually


class Engine:
    """Stands for the `Popen` of an engine. `has`: the names of the requests that it has, by number."""

    def __init__(self, world: World, passed: tuple[int, int]) -> None:
        self.pid = len(world.engines) + 1
        self.has: dict[int, str] = {}
        self.returncode: int | None = None
        self.begin: Begin | None = None
        self._world, self._ended = world, threading.Event()
        self.channel, self._batches = Channel(os.dup(passed[0])), os.dup(passed[1])
        self.shown: InFlight | None = InFlight(2, 8, self._batches)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while self._takes(self.channel.arrived(inf)):
            pass
        if not self._world.is_stubborn:
            self.end()
        self.channel.close()
        os.close(self._batches)
        self.shown = None

    def _takes(self, messages: list) -> bool:
        for message in messages:
            if isinstance(message, Begin):
                starts, self.begin = self._world.starts, message
                if starts:
                    with suppress(OSError):  # the client has closed meanwhile, as the end of the messages will say
                        self.channel.send(Ready())
            elif isinstance(message, bytearray):
                self.has |= {number: name for number, _, name, _ in requests_in(message)}
            elif isinstance(message, Shutdown) and not self._world.is_stubborn:
                self.answer(*self.has)
                self.end()
        return messages[-1] is not None

    def answer(self, *numbers: int, together: bool = True, beat: bool = False) -> None:
        """Answers requests of two texts with their names. Some may have their answers already, or not be known."""
        parts = [numbers] if together else [(number,) for number in numbers]
        named = [[name for number in part for name in [self.has.get(number, "?")] * 2] for part in parts]
        replies = [Reply([(number, 2) for number in part], labels(own)) for part, own in zip(parts, named, strict=True)]
        for number in numbers:
            self.has.pop(number, None)
        if beat:
            self.beat(0.99 * STUCK_SECONDS)
        if numbers:
            self.channel.send_bytes([packed(replies)])

    def beat(self, busy_s: float) -> None:
        """Says how long a thread has been at one piece of work."""
        self.channel.send(Beat({}, {}, busy_s))

    def miscount(self) -> None:
        """Says counts that nobody can take."""
        self.channel.send(Beat(None, None, 0.0))

    def show(self, *numbers: int, computes: bool = True) -> None:
        """Notes requests as computed or, before that, as staged, until the engine ends."""
        of = {number: self.has[number] for number in numbers}
        entries = [InFlightEntry(number, uid_of(name), name.split()[0]) for number, name in of.items()]
        self.shown.enter("batch", [entry.packed() for entry in entries])
        if computes:
            self.shown.compute("batch")

    def damage(self) -> None:
        os.pwrite(self._batches, b"\xff" * 16, 0)

    def end(self, code: int = -signal.SIGKILL) -> None:
        if self.returncode is None:
            self.returncode = code
            self.channel.shut()
            self._ended.set()

    def kill(self) -> None:
        if not self._world.is_stubborn:
            self.end()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        fault, self._world.wait_fails = self._world.wait_fails, None
        if fault is not None:
            raise fault
        if timeout is not None and self._world.is_stubborn:
            raise subprocess.TimeoutExpired("an engine", timeout)
        assert self._ended.wait(PATIENCE), "nobody has ended it"
        return self.returncode


def uid_of(name: str) -> int:
    """Returns the uid of a request's tenant."""
    return sum(name.split()[0].encode())


def labels(names: list[str]) -> Outputs:
    return {"LABEL": strings([name.encode() for name in names]).reshape(-1, 1)}


class Asked:
    """A request whose `submit` runs in a thread of its own, and notes in which order what happens to it."""

    def __init__(self, world: World, name: str, allowed_s=0.0, sends=None):
        """`sends`: the error that is sent instead of its answer, or "gone": nobody reads it."""
        self.name, self.events, self.answers = name, [], []
        self.allowed_s, self.sends = allowed_s, sends
        arrival_ns = world.clock.monotonic_ns() - 10**9
        times = {"arrival_ns": arrival_ns, "deadline_ns": arrival_ns + round(1e9 * allowed_s) if allowed_s else 0}
        form = write(b"", TicketHead("law", name.split()[0], 0, 0, 0, uid_of(name), **times), [0], [0], b"", b"", b"")
        respond = partial(self._answered)
        self.kept = weakref.ref(respond)
        pending = Pending(form, respond, partial(self.events.append, "deferred"), name, 1, head=read_head(form))
        self._own = threading.Thread(target=world.client.submit, args=([pending],), daemon=True)
        self._own.start()

    def _answered(self, answer):
        self.events.append("returned" if threading.current_thread() is self._own else "sent")
        self.answers.append(answer)
        if self.sends == "gone":
            raise ConnectionError
        return self.sends

    def submitted(self) -> None:
        """Returns when `submit` has."""
        self._own.join(PATIENCE)
        assert not self._own.is_alive(), f"{self.name} still waits"

    @property
    def word(self) -> str | None:
        """Returns the word of its one answer, None for the right one."""
        eventually(lambda: self.answers)
        self.submitted()
        (answer,) = self.answers
        if isinstance(answer, dict):
            assert answer["LABEL"].ravel().tolist() == [self.name.encode()] * 2, f"{self.name} got the answer of another one"
            return None
        return answer.word


class World:
    def __init__(self, folder: Path, soon_s: float) -> None:
        """`folder`: of its backbone. `soon_s`: how long the client waits for an answer before it defers a request."""
        self.engines: list[Engine] = []
        self.asked: list[Asked] = []
        self.is_stubborn = False
        self.starts, self.wait_fails, self.popen_fails = True, None, None
        self.meter, self.counted, self.clock = Outcomes(), Counter(), Clock(time.time())
        workers = partial(Workers, popen=self._start)
        self.client = EncoderClient(folder / "1", {}, None, self.meter, soon_s, workers, self.clock)
        self.workers = self.client.workers

    def _start(self, command, pass_fds, **_) -> Engine:
        fault, self.popen_fails = self.popen_fails, None
        if fault is not None:
            raise fault
        self.engines.append(Engine(self, pass_fds))
        return self.engines[-1]

    @property
    def engine(self) -> Engine:
        return self.engines[-1]

    def ask(self, tenant: str = "acme", **how) -> Asked:
        """Returns when the engine has the request, or it has its answer."""
        one = Asked(self, f"{tenant} {len(self.asked)}", **how)
        self.asked.append(one)
        eventually(lambda: one.answers or one.name in [*self.engine.has.values()])
        return one

    def until_serving(self) -> None:
        eventually(lambda: (own := self.workers.current) is not None and own.pid == self.engine.pid)

    def come_back(self) -> None:
        """The newest engine is ready, which was not to start before."""
        eventually(lambda: self.engine.begin is not None)
        self.starts = True
        self.engine.channel.send(Ready())
        self.until_serving()

    def hang(self) -> None:
        """The engine says that it has been at one piece of work for too long, and the next look is at that."""
        hanging = self.workers.current
        self.engine.beat(STUCK_SECONDS)
        eventually(lambda: hanging.silent_s == inf)
        self.workers.look()

    def fall_silent(self) -> None:
        """So many seconds pass in which the engine says nothing."""
        for _ in range(round(STUCK_SECONDS) + 1):
            self.workers.look()

    def send_fails(self, error: type[Exception]) -> None:
        def fail(parts):
            raise error

        self.workers.current.channel.send_bytes = fail

    def counts(self) -> Counter:
        """Returns what was counted, by the name of the metric and its last label."""
        for (metric, labels), count in self.meter.take()[0].items():
            if count:
                self.counted[metric, labels[-1] if labels else ""] += count
        return self.counted

    def close(self) -> None:
        self.is_stubborn = False
        self.client.close()
