"""Keeps the requests that the engine's process works on, and answers every one of them, whatever becomes of that process.

If the engine ends or stops moving, its requests are answered with an error, and another engine is started. Clients retry those
that only waited. Tenants whose requests were in a batch run alone (`hplm.engine.suspects`) and may end in quarantine.
This module does not import torch: the process that keeps requests stays small.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from hplm.engine.channel import DEVICE_FAILED, Ask, Asks, Beat, Begin, Channel, End, Failure, Outputs, Ready, Replies, Reply
from hplm.engine.in_flight import number_of, read
from hplm.engine.outage import Outage
from hplm.engine.separation import Separation
from hplm.engine.threads import repeat
from hplm.errors import Broken, Crashed, Draining, HplmError, Internal, for_client
from hplm.metrics import names
from hplm.metrics.busiest import OTHERS
from hplm.metrics.meter import Counted, Meter, Series
from hplm.tenants.ticket import TICKET_BYTES, Ticket

log = logging.getLogger(__name__)
START_SECONDS = 600.0  # an engine that is not ready by then is ended
CLOSE_SECONDS = 9.0  # a little more than the engine takes to drain
BEATLESS_SECONDS = 10.0  # an engine that says nothing for so long is ended, without the time in which this process is paused
STUCK_SECONDS = 60.0  # and one that computes a batch for so long
LONGEST_PAUSE = 30.0  # seconds between attempts to start an engine
ANSWERING_THREADS = 4  # each answer is a round trip to the server process
SOON_SECONDS = 0.01  # that `submit` waits for answers, unless they have lately taken longer
LEARNING = 0.1  # rate of the running mean of that
IDLE_SECONDS = 0.05  # between looks at an engine that has no requests
# oneDNN keeps 1,024 compiled products by default. These are enough for all sizes of the shared products up to 4,096 tokens.
CACHED_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}

RESTARTING = "the engine is being started again: send the request again"
GIVEN_UP = "the engine is started again and again, and does not keep working: restart the server; its log says why"
ENDED = Draining("the engine ended while the request waited, and is being started again: send the request again")
CRASHED = Crashed(
    "the engine ended while it computed this request and maybe others: a tenant whose requests do that twice is quarantined, "
    "so look for the cause in the server's log before you send the request again"
)

Respond = Callable[[Outputs | Failure], HplmError | None]  # sends an answer; returns the error that was sent instead


class Asked(NamedTuple):
    """A looked-up request."""

    signed: bytes  # a valid ticket and what was looked up
    id: str  # the client's name for it
    wanted: frozenset[str]  # outputs
    respond: Respond
    defer: Callable[[], None]  # called before another thread than that of `submit` may answer
    backbone: int = 0  # whose lookup has signed the ticket
    passed_on: float = 0.0  # when the engine got it


@dataclass
class _Engine:
    """One engine process, and the requests that it has."""

    process: subprocess.Popen[bytes]
    channel: Channel
    silent_s: float  # without a beat
    held: dict[int, Asked]  # without what was looked up
    batches: int  # descriptor of memory that shows what is in them
    told: object  # which tenants are apart, as it was told last
    corrections: list[tuple[Meter, Counted]] = field(default_factory=list)  # of what its next beat will count

    def end(self) -> None:
        """Ends it for us, even if the system cannot end the process yet: a driver or a disk may delay that."""
        self.process.kill()
        self.channel.shut()


class Keeper:
    def __init__(
        self, folders: Sequence[Path], parameters: Mapping[str, str], state: Path | None, meters: Sequence[Meter]
    ) -> None:
        """Starts the engine, which computes the backbones of these folders. Raises Broken if it cannot serve."""
        self._meters = meters  # by backbone
        self._separation = Separation(folders, meters)
        self._begin = Begin(folders, dict(parameters), state, self._separation.apart)
        self._busiest: list[frozenset[str]] = [frozenset() for _ in meters]
        self._lock = threading.Lock()
        self._numbers = 0
        self._receiving = threading.Lock()  # held by the thread that receives; before the other lock
        self._deferred = threading.Event()  # set when the keeping thread has something to receive
        self._took_s = 0.0  # from the engine's getting a request to its answer, a running mean
        self._closing = threading.Event()
        self._newest: subprocess.Popen[bytes]
        for meter in meters:
            meter.add(names.ENGINE_RESTARTS, 0)
            for error in (Crashed, Draining):
                meter.add(names.LOST_REQUESTS, 0, error.word)
        self._answers: queue.SimpleQueue[tuple[_Engine, Asked, Outputs | Failure, Counted, int] | None] = queue.SimpleQueue()
        self._answering = [repeat(self._answer_next, "answer") for _ in range(ANSWERING_THREADS)]
        began = time.monotonic()
        self._engine: _Engine | None = self._start()
        self._outage = Outage.of_first(began, time.monotonic())
        self._thread = threading.Thread(target=self._keep, args=(self._engine,), name="keep", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The engine's process."""
        engine = self._engine
        return engine.process.pid if engine is not None else None

    def check(self) -> None:
        """Raises if there is no engine that works: Draining if there may soon be one, else Internal."""
        if self._outage.is_given_up(time.monotonic()):
            raise Internal(GIVEN_UP)
        engine = self._engine
        if engine is None or engine.silent_s > BEATLESS_SECONDS:
            raise Draining(RESTARTING)  # a new one each time: an error keeps every frame that it was raised in

    def submit(self, asked: Sequence[Asked]) -> None:
        """Takes requests. Each is answered once, through its `respond`: before this returns, or else after its `defer`.

        It waits for answers that come soon. Nobody else receives meanwhile, so no thread must be woken for them.
        """
        if not asked:
            return
        waits = self._took_s < SOON_SECONDS and self._receiving.acquire(blocking=False)
        try:
            self._pass_on(asked, waits)
        finally:
            if waits:
                self._receiving.release()

    def _pass_on(self, asked: Sequence[Asked], waits: bool) -> None:
        now = time.monotonic()
        with self._lock:
            engine = self._engine
            numbers = range(self._numbers, self._numbers + len(asked))
            self._numbers += len(asked)
            if engine is not None:
                waits = waits and not engine.held
                if not waits:
                    _defer(asked)
                kept = (one._replace(signed=one.signed[:TICKET_BYTES], passed_on=now) for one in asked)
                engine.held.update(zip(numbers, kept, strict=True))
        if engine is None:
            for one in asked:
                self._lose(one, Draining(RESTARTING))
            return
        if not waits:
            self._deferred.set()
        try:
            if engine.told is not (apart := self._separation.apart):
                engine.channel.send(apart)
                engine.told = apart
            engine.channel.send(Asks([Ask(number, *one[:3], one.backbone) for number, one in zip(numbers, asked, strict=True)]))
        except Exception as error:  # whoever removes a request from `held` answers it
            if isinstance(error, OSError):
                error = Draining(RESTARTING)
            else:
                log.exception("cannot pass requests on to the engine")
            for number in numbers:
                if (held := self._taken(engine, number)) is not None:
                    self._lose(held, for_client(error, "passing the request on"))
        if waits:
            self._wait(engine)

    def _wait(self, engine: _Engine) -> None:
        """Receives for so long as answers may come soon. Then defers what has none: the keeping thread receives again."""
        now, now_ns = time.monotonic(), time.monotonic_ns()
        deadlines_ns = [Ticket.read(one.signed)[0].deadline_ns for one in engine.held.values()]
        left_s = (min(filter(None, deadlines_ns), default=sys.maxsize) - now_ns) / 1e9
        until = now + min(SOON_SECONDS, left_s)
        try:
            while engine.held and engine.channel.comes(until - time.monotonic()):
                if not self._receive_next(engine, returned=True):
                    break
        except Exception:
            log.exception("what the engine said cannot be read")
            engine.end()  # so that the keeping thread answers its requests
        _defer(list(engine.held.values()))
        self._deferred.set()

    def keeps(self, backbone: int, series: Series) -> bool:
        """Whether a series of a backbone is still published."""
        metric, labels = series
        return metric is not names.TENANT_REQUESTS or labels[0] in (OTHERS, *self._busiest[backbone])

    def close(self) -> None:
        """Lets the engine answer what waits, and ends it."""
        with self._lock:
            self._closing.set()
            engine = self._engine
        self._deferred.set()
        if engine is not None:
            try:
                engine.channel.send(End())
            except OSError:
                log.info("the engine has ended already")
            self._thread.join(CLOSE_SECONDS)
        self._newest.kill()  # also one that has not started yet
        self._thread.join()
        for _ in self._answering:
            self._answers.put(None)
        for thread in self._answering:
            thread.join()

    def _start(self) -> _Engine:
        begin = replace(self._begin, apart=self._separation.apart)
        environment = {**CACHED_PRODUCTS, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with ExitStack() as failed:
            batches = os.memfd_create("hplm-batches")
            failed.callback(os.close, batches)
            ours, its = socket.socketpair()
            failed.callback((channel := Channel(ours.detach())).close)
            with its:
                passed = its.fileno(), batches
                command = [_python(), "-m", "hplm.engine.child", *map(str, passed)]
                process = subprocess.Popen(command, pass_fds=passed, env=environment, stdin=subprocess.DEVNULL)
            answer = self._first_said(process, channel, begin)
            if isinstance(answer, Ready) and not answer.failure:
                failed.pop_all()
                return _Engine(process, channel, 0.0, {}, batches, begin.apart)
            process.kill()
            code = process.wait()
            said = answer.failure if isinstance(answer, Ready) else f"it ended with {_reason(code)}: read the log"
            raise Broken(f"the engine of {', '.join(map(str, begin.folders))} does not start: {said}")

    def _first_said(self, process: subprocess.Popen[bytes], channel: Channel, begin: Begin) -> object:
        """Returns the first message of a new engine; None if it ends before, or is ended because it takes too long."""
        with self._lock:
            self._newest = process
            if self._closing.is_set():
                process.kill()
        too_late = threading.Timer(START_SECONDS, _end_late, [process])
        too_late.daemon = True
        try:
            too_late.start()
            channel.send(begin)
            return channel.receive()
        except Exception:  # it has ended, or there is no memory or no thread
            log.exception("a new engine cannot be asked to begin")
            return None
        finally:
            too_late.cancel()

    def _keep(self, engine: _Engine | None) -> None:
        """Answers what the engine answers. When it ends, answers the rest, and starts another, until closed."""
        while engine is not None:
            for step in (self._receive, self._end):
                try:
                    step(engine)
                except Exception:  # its requests must still be answered, and another engine started
                    log.exception("cannot read what the engine said, or end it")
            engine = self._start_again()

    def _receive(self, engine: _Engine) -> None:
        """Receives while requests are deferred. Otherwise looks now and then, because `submit` receives itself."""
        while True:
            self._deferred.wait(IDLE_SECONDS)
            self._deferred.clear()
            with self._receiving:
                while engine.held or self._closing.is_set() or engine.channel.comes():
                    if not self._receive_next(engine):
                        return

    def _receive_next(self, engine: _Engine, returned: bool = False) -> bool:
        """Waits for a message. Returns False when the engine has gone. `returned`: this thread returns the answers."""
        message = engine.channel.receive()
        if isinstance(message, Beat):
            engine.silent_s = 0.0 if message.computing_s < STUCK_SECONDS else float("inf")
            self._busiest = [beaten.busiest for beaten in message.backbones]
            for meter, beaten in zip(self._meters, message.backbones, strict=True):
                meter.add_all(beaten.counts)
                meter.set_all(beaten.levels)
            with self._lock:
                corrections, engine.corrections = engine.corrections, []
            for meter, counted in corrections:
                meter.add_all(dict.fromkeys(counted, -1))
        elif isinstance(message, Replies):
            for reply in message.replies:
                self._answer_all(engine, reply, returned)
        return message is not None

    def _answer_all(self, engine: _Engine, reply: Reply, returned: bool) -> None:
        """Answers requests. What is not returned is a round trip to the server process each, so several threads share them."""
        here = returned or (len(reply.numbers) == 1 and not engine.channel.comes())  # nothing else waits for this thread
        start, now = 0, time.monotonic()
        for index, (number, texts) in enumerate(zip(reply.numbers, reply.texts, strict=True)):
            answer, start = _cut(reply.answer, start, start + texts), start + texts
            held = self._taken(engine, number)
            if held is None:
                continue
            self._took_s += LEARNING * (now - held.passed_on - self._took_s)
            if self._separation.apart.alone and not isinstance(answer, tuple):
                self._separation.answered(number_of(held.backbone, Ticket.read(held.signed)[0].uid))
            counted, deadline_ns = (reply.counted[index], reply.deadlines_ns[index]) if reply.counted else ((), 0)
            if here:
                self._answer(engine, held, answer, counted, deadline_ns)
            else:
                self._answers.put((engine, held, answer, counted, deadline_ns))

    def _end(self, engine: _Engine) -> None:
        """Answers what the process still had, and makes sure that it has ended. A driver or a disk may delay that."""
        with self._receiving, self._lock:  # nobody waits: all that it has are deferred
            self._engine = None
        self._outage = self._outage.ended(time.monotonic())
        engine.end()
        engine.channel.close()
        with self._lock:
            left, engine.held = engine.held, {}
        numbers = set(left)
        try:
            computed = [] if self._closing.is_set() else list(read(engine.batches))
            numbers = {mark.number for mark in computed}
            self._separation.ended(computed)
        except Exception:  # the requests must still be answered, and another engine started
            log.exception("cannot find out which requests may have ended the engine")
        for number, held in left.items():
            lost = CRASHED if number in numbers else ENDED
            self._meters[held.backbone].add(names.LOST_REQUESTS, 1, lost.word)
            self._answers.put((engine, held, lost.failure(), (), 0))
        os.close(engine.batches)
        code = engine.process.wait()
        if not self._closing.is_set():
            log.error("the engine ended with %s while it had %d requests", _reason(code), len(left))

    def _start_again(self) -> _Engine | None:
        """Returns a new engine, or None if the model is closed before there is one."""
        pause = 1.0
        while not self._closing.is_set():
            try:
                for meter in self._meters:
                    meter.add(names.ENGINE_RESTARTS)
                engine = self._start()
            except Exception as error:  # such as no memory, no process or no thread
                log.error("%s; another attempt follows in %g s", error, pause, exc_info=not isinstance(error, HplmError))
            else:
                self._outage = self._outage.started(time.monotonic())
                with self._lock:
                    if not self._closing.is_set():
                        self._engine = engine
                        return engine
                self._end(engine)
            self._closing.wait(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        return None

    def _watch(self) -> None:
        """Ends an engine that does not move, so that its requests are answered. Looks who is released meanwhile."""
        while not self._closing.wait(1.0):
            self._look()

    def _look(self) -> None:
        """Counts a second. A clock would count the time in which all processes are paused."""
        engine = self._engine
        if engine is not None:
            engine.silent_s += 1.0
            if engine.silent_s > BEATLESS_SECONDS:
                log.error("the engine has not moved for %g s: it is ended", BEATLESS_SECONDS)
                engine.end()
        self._separation.look()

    def _taken(self, engine: _Engine, number: int) -> Asked | None:
        """Returns a request that has no answer yet, to the first caller."""
        with self._lock:
            return engine.held.pop(number, None)

    def _lose(self, one: Asked, error: HplmError) -> None:
        """Answers a request that no engine got."""
        self._meters[one.backbone].add(names.LOST_REQUESTS, 1, error.word)
        _answer(one.respond, error.failure())

    def _answer(self, engine: _Engine, held: Asked, answer: Outputs | Failure, counted: Counted, deadline_ns: int) -> None:
        """Sends an answer. If an error was sent instead, or if it left too late, counts that and no longer the answer."""
        unsent = _answer(held.respond, answer)
        if unsent is not None:
            outcome = unsent.word
        elif deadline_ns and time.monotonic_ns() > deadline_ns:
            outcome = names.LATE
        else:
            return
        meter = self._meters[held.backbone]
        with self._lock:
            engine.corrections.append((meter, counted))
        meter.add_all({(metric, (of, outcome)): 1 for metric, (of, _) in counted})

    def _answer_next(self) -> bool:
        given = self._answers.get()
        if given is not None:
            self._answer(*given)
        return given is not None


def _cut(answer: Outputs | Failure, start: int, stop: int) -> Outputs | Failure:
    """Returns a request's part of the answer to several requests."""
    return answer if isinstance(answer, tuple) else {name: values[start:stop] for name, values in answer.items()}


def _defer(asked: Sequence[Asked]) -> None:
    for one in asked:
        one.defer()


def _answer(respond: Respond, answer: Outputs | Failure) -> HplmError | None:
    try:
        return respond(answer)
    except Exception:
        log.exception("cannot send an answer")
        return None


def _end_late(process: subprocess.Popen[bytes]) -> None:
    log.error("the engine was not ready after %g s: it is ended", START_SECONDS)
    process.kill()


def _reason(code: int) -> str:
    if code == DEVICE_FAILED:
        return f"code {code}, a fault of its device"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _python() -> str:
    """Returns an interpreter of this version. A model process embeds Python, so its own executable may be another program."""
    return shutil.which(f"python{sys.version_info.major}") or sys.executable
