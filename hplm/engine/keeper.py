"""Keeps the requests that the engine's process works on, and answers every one of them, whatever becomes of that process.

If the engine ends or stops moving, its requests are answered with an error that clients retry, and another engine is started.
This module does not import torch: the process that keeps requests stays small.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hplm.engine.channel import Ask, Beat, Begin, Channel, End, Failure, Outputs, Ready, Reply
from hplm.engine.looked_up import LookedUp
from hplm.errors import Broken, Draining, HplmError
from hplm.metrics import names
from hplm.metrics.busiest import OTHERS
from hplm.metrics.meter import Meter, Series
from hplm.tenants.ticket import Ticket

log = logging.getLogger(__name__)
START_SECONDS = 600.0
CLOSE_SECONDS = 9.0  # a little more than the engine takes to drain
BEATLESS_SECONDS = 10.0  # an engine that says nothing for so long is ended
STUCK_SECONDS = 60.0  # and one that computes a batch for so long
LONGEST_PAUSE = 30.0  # seconds between attempts to start an engine
ANSWERING_THREADS = 4  # each answer is a round trip to the server process

Respond = Callable[[Outputs | Failure], HplmError | None]  # sends an answer; returns the error that was sent instead


@dataclass
class _Engine:
    """One engine process, and the requests that it has."""

    process: subprocess.Popen[bytes]
    channel: Channel
    beat: float  # time of the last beat
    held: dict[int, Respond]


class Keeper:
    def __init__(self, folder: Path, parameters: Mapping[str, str], state: Path | None, meter: Meter) -> None:
        """Starts the engine. Raises Broken if it cannot serve."""
        self._begin = Begin(folder, dict(parameters), state)
        self._meter = meter
        self._busiest: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._numbers = 0
        self._closing = threading.Event()
        meter.add(names.ENGINE_RESTARTS, 0)
        self._answering = ThreadPoolExecutor(ANSWERING_THREADS, thread_name_prefix="answer")
        self._engine: _Engine | None = self._start()
        self._thread = threading.Thread(target=self._keep, args=(self._engine,), name="keep", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The engine's process."""
        engine = self._engine
        return engine.process.pid if engine is not None else None

    def submit(
        self,
        ticket: Ticket,
        looked_up: LookedUp,
        respond: Respond,
        passages: Sequence[str] | None = None,
        id: str = "",
        wanted: frozenset[str] = frozenset(),
    ) -> None:
        """Takes a request, or raises. A request that was taken is answered once, through `respond`."""
        with self._lock:
            engine = self._engine
            if engine is None:
                raise Draining("the engine is being started again: send the request again")
            self._numbers += 1
            number = self._numbers
            engine.held[number] = respond
        try:
            engine.channel.send(Ask(number, ticket, looked_up, list(passages) if passages is not None else None, id, wanted))
        except OSError:  # the engine has just ended; whoever removes the request from `held` answers it
            if self._take(engine, number) is not None:
                raise Draining("the engine is being started again: send the request again") from None

    def keeps(self, series: Series) -> bool:
        """Whether a series is still published."""
        metric, labels = series
        return metric is not names.TENANT_REQUESTS or labels[0] in (OTHERS, *self._busiest)

    def close(self) -> None:
        """Lets the engine answer what waits, and ends it."""
        with self._lock:
            self._closing.set()
            engine = self._engine
        if engine is not None:
            try:
                engine.channel.send(End())
            except OSError:
                log.info("the engine has ended already")
            self._thread.join(CLOSE_SECONDS)
            engine.process.kill()
        self._thread.join()
        self._answering.shutdown(wait=True)

    def _start(self) -> _Engine:
        ours, its = socket.socketpair()
        with its:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            process = subprocess.Popen(
                [_python(), "-m", "hplm.engine.child", str(its.fileno())],
                pass_fds=[its.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        channel = Channel(ours.detach())
        channel.send(self._begin)
        answer = channel.receive()
        if not isinstance(answer, Ready) or answer.failure:
            process.kill()
            said = answer.failure if isinstance(answer, Ready) else f"it ended with code {process.wait()}: read the log"
            process.wait()
            channel.close()
            raise Broken(f"the engine of {self._begin.folder} does not start: {said}")
        return _Engine(process, channel, time.monotonic(), {})

    def _keep(self, engine: _Engine) -> None:
        """Answers what the engine answers. When it ends, answers the rest, and starts another, until closed."""
        while True:
            self._receive(engine)
            with self._lock:
                self._engine = None
            self._end(engine)
            started = self._start_again()
            if started is None:
                return
            engine = started
            with self._lock:
                if not self._closing.is_set():
                    self._engine = engine
            if self._engine is None:  # closed meanwhile
                self._end(engine)
                return

    def _receive(self, engine: _Engine) -> None:
        while (message := engine.channel.receive()) is not None:
            if isinstance(message, Beat):
                engine.beat = time.monotonic() if message.computing_s < STUCK_SECONDS else 0.0
                self._busiest = message.busiest
                self._meter.add_all(message.counts)
                self._meter.set_all(message.levels)
            elif isinstance(message, Reply):
                respond = self._take(engine, message.number)
                if respond is None:
                    continue
                if engine.channel.waits:
                    self._answering.submit(self._answer, respond, message)
                else:  # nothing else waits for this thread
                    self._answer(respond, message)

    def _end(self, engine: _Engine) -> None:
        """Makes sure that the process has ended, and answers what it still had."""
        engine.process.kill()
        code = engine.process.wait()
        engine.channel.close()
        with self._lock:
            left, engine.held = list(engine.held.values()), {}
        if not self._closing.is_set():
            log.error("the engine ended with %s while it had %d requests", _reason(code), len(left))
        ended = Draining("the engine ended while it had the request, and is being started again: send the request again")
        for respond in left:
            self._answering.submit(_answer, respond, (ended.status, ended.wire()))

    def _start_again(self) -> _Engine | None:
        """Returns a new engine, or None if the model is closed before there is one."""
        pause = 1.0
        while not self._closing.is_set():
            try:
                self._meter.add(names.ENGINE_RESTARTS)
                return self._start()
            except (HplmError, OSError) as error:
                log.error("%s; another attempt follows in %g s", error, pause)
            self._closing.wait(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        return None

    def _watch(self) -> None:
        """Ends an engine that does not move, so that its requests are answered."""
        while not self._closing.wait(1.0):
            engine = self._engine
            if engine is not None and time.monotonic() - engine.beat > BEATLESS_SECONDS:
                log.error("the engine has not moved for %g s: it is ended", BEATLESS_SECONDS)
                engine.process.kill()

    def _answer(self, respond: Respond, reply: Reply) -> None:
        """Sends an answer. If an error was sent instead, counts that and no longer the answer."""
        unsent = _answer(respond, reply.answer)
        if unsent is not None:
            self._meter.add_all(dict.fromkeys(reply.counted, -1))
            self._meter.add_all({(metric, (of, unsent.word)): 1 for metric, (of, _) in reply.counted})

    def _take(self, engine: _Engine, number: int) -> Respond | None:
        with self._lock:
            return engine.held.pop(number, None)


def _answer(respond: Respond, answer: Outputs | Failure) -> HplmError | None:
    try:
        return respond(answer)
    except Exception:
        log.exception("cannot send an answer")
        return None


def _reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _python() -> str:
    """Returns an interpreter of this version. A model process embeds Python, so its own executable may be another program."""
    return shutil.which(f"python{sys.version_info.major}") or sys.executable
