"""The engine's process as the model process sees it: started, watched, killed, and started again until it is closed."""

from __future__ import annotations

import logging
import os
import select
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from hplm.clock import Clock
from hplm.errors import Broken, Draining, HplmError, Internal
from hplm.process.channel import DEVICE_FAILED, Apart, Begin, Channel, Ready, Shutdown
from hplm.server.process import Popen, Process, Tie, longer
from hplm.server.process_group import KILL_SECONDS, reason
from hplm.threads import repeat

log = logging.getLogger(__name__)
START_SECONDS = 600.0  # an engine that is not ready by then is ended
CLOSE_SECONDS = 9.0  # a little more than the engine takes to drain
# An engine that says nothing, or is at one batch, snapshot or prompt for so long, is ended. It is counted in looks and beats,
# without pauses of the machine. A minute, because a machine without memory or processors lets a process stand for many seconds.
STUCK_SECONDS = 60.0
PATIENCE_SECONDS = 120.0  # an outage that lasts longer does not end by itself
STEADY_SECONDS = 60.0  # an engine that has worked for so long has ended the outage
# oneDNN keeps 1,024 compiled products by default. These are enough for all sizes of the shared products up to 4,096 tokens,
# computed by one thread and by all.
CACHED_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512"}

RESTARTING = "the engine is being started again: send the request again"
GIVEN_UP = "the engine is started again and again, and does not keep working: restart the server; its log says why"


@dataclass(frozen=True)
class Outage:
    """The time since an engine last worked steadily. An engine that works for a moment after each start does not end it."""

    patience: float
    began: float
    works_since: float | None  # None: no engine works

    @classmethod
    def of_first(cls, began: float, works_since: float) -> Outage:
        """Returns that of a first engine. A later one may take twice as long to load its model as the first one did."""
        return cls(max(PATIENCE_SECONDS, 2 * (works_since - began)), works_since, works_since)

    def ended(self, now: float) -> Outage:
        return replace(self, began=now if self._is_over(now) else self.began, works_since=None)

    def resumed(self, now: float) -> Outage:
        return replace(self, works_since=now)

    def is_given_up(self, now: float) -> bool:
        """Whether only a restart of the server may still help."""
        until = now if self.works_since is None else self.works_since
        return not self._is_over(now) and until - self.began > self.patience

    def _is_over(self, now: float) -> bool:
        return self.works_since is not None and now - self.works_since > STEADY_SECONDS


class Worker(Process):
    """One process of the engine. It ends when its end of the channel does."""

    def __init__(self, module: str, told: Apart, popen: Popen | None = None) -> None:
        """`module`: what it runs. `told`: which tenants are apart, as it was told last."""
        with ExitStack() as opened:
            self.batches = os.memfd_create("hplm-batches")  # memory that shows what is in them
            opened.callback(os.close, self.batches)
            ours, self._its = socket.socketpair()
            opened.enter_context(self._its)
            self.channel = Channel(ours.detach())
            opened.callback(self.channel.close)
            self.bell = opened.enter_context(select.epoll())
            self.bell.register(self.channel, select.EPOLLIN)
            self._opened = opened.pop_all()
        self.told = told
        self.silent_s = 0.0  # without a heartbeat
        passed = self._its.fileno(), self.batches
        environment = {**CACHED_PRODUCTS, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [_python(), "-m", module, *map(str, passed)]
        super().__init__(
            *("the engine", command, None),
            descriptors=passed, folder=_folder(), environment=environment, tie=Tie.GROUP, popen=popen,
        )  # fmt: skip

    def start(self) -> None:
        super().start()
        self._its.close()

    @property
    def is_stuck(self) -> bool:
        """Whether it has not moved for so long that it is ended."""
        return self.silent_s > STUCK_SECONDS

    def begin(self, begin: Begin, patience: float) -> Ready | None:
        """Tells it what to serve. Returns its answer; None: it has ended, or is silent for so long."""
        said = None
        with suppress(OSError):  # it has ended
            self.channel.send(begin)
            said = self.channel.receive(patience)
        return said if isinstance(said, Ready) else None

    def ring(self, rings: bool) -> None:
        """Says whether what comes wakes the thread that waits for it at the bell. The end of the process always does."""
        self.bell.modify(self.channel, select.EPOLLIN if rings else 0)

    def end(self) -> None:
        """Ends it for us, even if the system cannot end the process yet: a driver or a disk may delay that."""
        self.kill()
        self.channel.shut()

    def forget(self) -> None:
        """Closes what is ours of it."""
        self._opened.close()

    def how_ended(self) -> str:
        """Returns how a killed one has ended, for the log. Waits for that, but for no driver and no disk."""
        code = self.wait(KILL_SECONDS)
        if code is None:
            return "cannot be ended yet"
        return f"ended with {reason(code)}{', a fault of its device' if code == DEVICE_FAILED else ''}"


class Workers:
    """Keeps a worker running."""

    def __init__(
        self,
        module: str,
        begin: Callable[[], Begin],
        receive: Callable[[Worker], None],
        ended: Callable[[Worker, bool], None],
        each_second: Callable[[], None],
        clock: Clock = time,
        popen: Popen | None = None,
        start_s: float = START_SECONDS,
    ) -> None:
        """Starts the first worker. Raises Broken if it cannot serve.

        `module`: what its process runs. `begin` is called for each start. `receive` takes the messages of a worker until it
        has gone, and `ended` is called then, with whether it was closed. `popen`: as of `Process`.
        A process that is not ready in `start_s` is ended.
        """
        self._module = module
        self._begin, self._receive, self._ended, self._each_second = begin, receive, ended, each_second
        self._time, self._popen, self._start_s = clock, popen, start_s
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._newest: Worker
        began = self._time.monotonic()
        self.current: Worker | None = self._start()
        self._outage = Outage.of_first(began, self._time.monotonic())
        self._thread = threading.Thread(target=self._keep, args=(self.current,), name="keep", daemon=True)
        self._thread.start()
        repeat(self._watch, "watch")

    def check(self) -> None:
        """Raises if there is no worker that works: Draining if there may soon be one, else Internal."""
        if self._outage.is_given_up(self._time.monotonic()):
            raise Internal(GIVEN_UP)
        worker = self.current
        if worker is None or worker.is_stuck:
            raise Draining(RESTARTING)  # a new one each time: an error keeps every frame that it was raised in

    def close(self, drain_s: float = CLOSE_SECONDS) -> None:
        """Lets the worker answer what waits, for so long at most, and ends it."""
        with self._lock:
            self._closing.set()
            worker = self.current
        if worker is not None:
            try:
                worker.channel.send(Shutdown())
            except OSError:
                log.info("the engine has ended already")
            self._thread.join(drain_s)
        self._newest.end()  # also one that has not started yet
        self._thread.join()

    def _start(self) -> Worker:
        begin = self._begin()
        worker = Worker(self._module, begin.apart, self._popen)
        with ExitStack() as failed:
            failed.callback(worker.forget)
            worker.start()
            with self._lock:
                self._newest = worker
                if self._closing.is_set():
                    worker.end()
            said = worker.begin(begin, self._start_s)
            if said is not None and not said.failure:
                failed.pop_all()
                return worker
            worker.end()
            how = worker.how_ended()
            why = said.failure if said is not None else f"it {how}, or was not ready: read the log"
            raise Broken(f"the engine of {begin.folder} does not start: {why}")

    def _keep(self, worker: Worker | None) -> None:
        """Receives from a worker. When it ends, starts another, until closed."""
        while worker is not None:
            for step in (self._receive, self._end):
                try:
                    step(worker)
                except Exception:  # its requests must still be answered, and another engine started
                    log.exception("cannot read what the engine said, or end it")
            worker = self._start_again()

    def _end(self, worker: Worker) -> None:
        self.current = None
        self._outage = self._outage.ended(self._time.monotonic())
        worker.end()
        self._ended(worker, self._closing.is_set())  # before the process has ended: a driver or a disk may delay that
        worker.forget()
        how = worker.how_ended()
        if not self._closing.is_set():
            log.error("the engine %s", how)

    def _start_again(self) -> Worker | None:
        """Returns a new worker, or None if the model is closed before there is one."""
        pause = 0.0
        while not self._closing.wait(pause):
            try:
                worker = self._start()
            except Exception as error:  # such as no memory, no process or no thread
                pause = longer(pause)
                log.error("%s; another attempt follows in %g s", error, pause, exc_info=not isinstance(error, HplmError))
            else:
                self._outage = self._outage.resumed(self._time.monotonic())
                with self._lock:
                    self.current = worker
                    if self._closing.is_set():
                        worker.end()
                return worker
        return None

    def _watch(self) -> bool:
        if self._closing.wait(1.0):
            return False
        self.look()
        self._each_second()
        return True

    def look(self) -> None:
        """Counts a second, and ends a worker that does not move. A clock would count the time in which processes are paused."""
        worker = self.current
        if worker is not None:
            worker.silent_s += 1.0
            if worker.is_stuck:
                log.error("the engine has not moved for %g s: it is ended", STUCK_SECONDS)
                worker.end()


def _folder() -> str:
    """Returns the working directory, or / if it is gone: it may be temporary, and Python does not start in such a one."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _python() -> str:
    """Returns an interpreter of this version. A model process embeds Python, so its own executable may be another program."""
    return shutil.which(f"python{sys.version_info.major}") or sys.executable
