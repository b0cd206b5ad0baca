"""The threads that drive an encoder or a decoder.

Idle, the computing thread waits for messages, and does everything for a lone request. Only when it has been away from them for
HELP_SECONDS, a helper receives, refuses, expires and prepares the next batch beside it. On accelerators and with several stages
the helper of an encoder starts at once. An engine with several stages has a further computing thread for each. If batches
overlap, the further thread waits for what the engine's own threads compute, and answers.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any, Protocol

from hplm.model.cpu import compute_with
from hplm.process.channel import Channel
from hplm.process.cores import Cores
from hplm.threads import repeat

log = logging.getLogger(__name__)
DRAIN_SECONDS = 8.0  # less than the exit timeout that `hplm serve` gives Triton
HELP_SECONDS = 0.005  # beside shorter batches another thread gains nothing
LOOK_SECONDS = 0.02  # after so long the helper looks whether it is still needed
AT_ONCE = 1e-9  # seconds; 0 would stop a timer
COMPUTING, HELPING = 0, -1
_libc = ctypes.PyDLL(None, use_errno=True)  # the calls are short, so they keep the interpreter's lock


@lru_cache(16)
def _times(seconds: float) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * 4)(0, 0, *divmod(round(1e9 * seconds), 10**9))


class Timer:
    """Wakes a thread after a time. Nobody is woken when it starts, or when it is stopped before."""

    def __init__(self) -> None:
        self._descriptor = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "there is no timer")

    def start(self, seconds: float) -> None:
        """Starts it anew; 0 stops it."""
        _libc.timerfd_settime(self._descriptor, 0, _times(seconds), None)

    def wait(self) -> None:
        os.read(self._descriptor, 8)

    def close(self) -> None:
        os.close(self._descriptor)


class Stepped(Protocol):
    """An engine that does its work a step at a time (`hplm.engine.encoder`). It has no thread and no clock of its own."""

    def wait_s(self) -> float: ...
    def expire(self) -> None: ...
    def prepare(self) -> Any | None: ...  # returns what `compute` takes; one thread at a time calls it
    def compute(self, prepared: Any, stage: int = 0, /) -> bool: ...  # returns whether it goes on to the next stage
    def close(self) -> None: ...
    @property
    def is_drained(self) -> bool: ...
    def abandon(self) -> None: ...


class Driver:
    def __init__(
        self,
        engine: Stepped,
        threads: tuple[int, int] = (1, 1),
        channel: Channel | None = None,
        take_in: Callable[[object], None] = lambda message: None,
        starts: Sequence[Callable[[], None]] = (lambda: None,),
        help_at_once: bool = False,
    ) -> None:
        """`take_in` is called with each message of the channel, and with None if there is no more.

        `threads`: among which what a stage computes is divided, and what the helper does. `starts`: each stage's thread calls
        its own first.
        """
        self._engine, self._channel, self._take_in = engine, channel, take_in
        self._help_s = AT_ONCE if help_at_once else HELP_SECONDS
        self._receiving, self._preparing = threading.Lock(), threading.Lock()
        self._ahead: Any | None = None  # the computing thread takes it, whoever prepares sets it
        self._handed: list[SimpleQueue[Any | None]] = [SimpleQueue() for _ in starts]  # to each further stage
        self._since: list[float | None] = [None for _ in (*starts, HELPING)]  # when each thread began what it does
        self._ends = math.inf  # when texts that still wait get an error
        self.ended = threading.Event()
        self._cores = Cores(threads[0])
        self._timer, self._bell = Timer(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._polls = {who: self._poll() for who in (COMPUTING, HELPING)}
        self._threads = [
            repeat(self._help, "help", partial(compute_with, threads[1])),
            *(self._computing(number, start, 1 if number else threads[0]) for number, start in enumerate(starts)),
        ]

    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if self._channel is not None:
            poll.register(self._channel, select.POLLIN)
        return poll

    def _computing(self, number: int, start: Callable[[], None], threads: int) -> threading.Thread:
        def prepare() -> None:
            start()
            compute_with(threads)

        return repeat(partial(self._go_on, number) if number else self._serve, f"compute {number + 1}", prepare)

    def busy_since(self) -> list[float]:
        """Returns when the batches began that threads prepare or compute now."""
        return [since for since in self._since if since is not None]

    def wake(self) -> None:
        """Lets whoever waits for messages look at the engine, because somebody else has changed it."""
        os.eventfd_write(self._bell, 1)

    def close(self, drain_s: float = DRAIN_SECONDS) -> None:
        """Serves what waits for so long at most, and answers the rest with an error. Sets `ended` then."""
        self._ends = time.monotonic() + drain_s
        self._engine.close()
        self.wake()

    def join(self) -> None:
        """Waits for the end, and for the threads."""
        self.ended.wait()
        for thread in self._threads:
            thread.join()
        self._timer.close()
        os.close(self._bell)

    def _serve(self) -> bool:
        """Waits for work and does it. Returns False at the end. What it has computed is freed before it waits again."""
        self._since[COMPUTING] = None
        self._timer.start(0)
        self._attend(COMPUTING, math.inf if self._ahead is None else 0.0)
        while self._compute_ahead():
            self._attend(COMPUTING, 0.0)
        return not self.ended.is_set()

    def _compute_ahead(self) -> bool:
        prepared = self._ahead
        if prepared is None:
            return False
        self._ahead = None
        with self._cores:
            goes_on = self._engine.compute(prepared)
        if goes_on:
            self._handed[1].put(prepared)
        return True

    def _go_on(self, stage: int) -> bool:
        """Computes one batch in a further stage. Returns False at the end."""
        prepared = self._handed[stage].get()
        if prepared is None:
            return False
        self._since[stage] = time.monotonic()
        try:
            if self._engine.compute(prepared, stage):
                self._handed[stage + 1].put(prepared)
        finally:
            self._since[stage] = None
            self.wake()
        return True

    def _help(self) -> bool:
        """Does what the computing thread is kept from. Returns False at the end."""
        self._timer.wait()
        try:
            while self._is_needed():
                self._attend(HELPING, LOOK_SECONDS)
        finally:
            self._since[HELPING] = None
            if self._since[COMPUTING] is None:
                self.wake()  # it has not seen what was done meanwhile
        return not self.ended.is_set()

    def _is_needed(self) -> bool:
        since = self._since[COMPUTING]
        return since is not None and time.monotonic() - since >= self._help_s and not self.ended.is_set()

    def _attend(self, who: int, longest_s: float) -> None:
        """Takes in messages, expires and prepares. Waits before, until there is something to do."""
        wait_s = min(longest_s, self._engine.wait_s(), self._ends - time.monotonic()) if longest_s else 0.0
        if who == HELPING:
            self._since[who] = None
        arrived = self._polls[who].poll(None if wait_s == math.inf else math.ceil(1000 * max(0.0, wait_s)))
        if who == HELPING and not self._is_needed():
            return
        self._since[who] = time.monotonic()
        if who == COMPUTING:
            self._timer.start(self._help_s)  # after the time was noted: it rings when the helper is needed, and not before
        if arrived:
            with self._receiving:
                self._receive()
        self._engine.expire()
        if self._preparing.acquire(blocking=False):  # who is in there may wait for a disk
            try:
                if self._ahead is None:
                    self._ahead = self._engine.prepare()
            finally:
                self._preparing.release()
        if self._ends < math.inf and (self._engine.is_drained or time.monotonic() >= self._ends):
            self._end()

    def _receive(self) -> None:
        with suppress(BlockingIOError):  # nobody has rung
            os.eventfd_read(self._bell)
        if self._channel is None:
            return
        try:
            for message in self._channel.arrived():
                if message is not None or not self.ended.is_set():  # behind the end, whoever closes the channel is right
                    self._take_in(message)
        except Exception:  # requests in it would never be answered
            log.critical("a message cannot be read", exc_info=True)
            self._take_in(None)

    def _end(self) -> None:
        self._engine.abandon()
        self.ended.set()
        self._timer.start(AT_ONCE)
        for handed in self._handed:
            handed.put(None)
