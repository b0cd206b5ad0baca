"""The threads of a decoder: one reads prompts, one steps, and one hands out what is said. So none holds up another."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hplm.errors import DeadlineMissed, Draining, HplmError, Internal, QueueFull, for_client
from hplm.generation.line import Line
from hplm.generation.loop import Loop
from hplm.generation.request import Piece, Request, Sequence
from hplm.scheduling.limits import Limits
from hplm.scheduling.turns import Turns

log = logging.getLogger(__name__)
PAUSE = 0.05  # seconds after an exception of the loop itself, so that the log does not fill at once
WAITS = 0.02  # seconds between two looks at the clock while something waits that cannot start yet
STUCK_SECONDS = 60.0  # in reading one prompt, in one step, or in sending one piece: each takes milliseconds
MOST_FAILURES = 100  # of the loop in a row: nobody has been answered for some seconds

T = TypeVar("T")
Said = tuple[Request, Piece | HplmError]


@dataclass(frozen=True, eq=False)
class Unread:
    """A request whose prompt still has to be read, as the line for it sees it."""

    request: Request
    read: Callable[[], None]
    left: int  # bytes of its prompt

    @property
    def tenant(self) -> int:
        return self.request.source.uid

    @property
    def deadline_ns(self) -> int:
        return self.request.start_by_ns


class Generator:
    """Pieces of one request come in order, from one thread. The last one ends it."""

    def __init__(
        self,
        line: Line,
        loop: Callable[[Callable[[Request, Piece | HplmError], None]], Loop],
        unread: Limits,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """`loop` makes the loop, given what takes the pieces that it says. Its thread calls `begin` first.

        `unread`: how many prompts, and bytes of them, may wait to be read.
        """
        self._line = line
        self._unread: Turns[Unread] = Turns(unread, unread.work, time.monotonic_ns)
        self._said: queue.SimpleQueue[Said | None] = queue.SimpleQueue()
        self.loop = loop(lambda request, piece: self._said.put((request, piece)))
        self._begin = begin
        self._abandoned = threading.Event()
        self._since: dict[str, float] = {}  # when each thread began what it is at; by its name, of those that do not wait
        self._failures = 0  # of the loop, since it last got on
        self._threads = [
            threading.Thread(target=self._read, name="read", daemon=True),
            threading.Thread(target=self._generate, name="generate", daemon=True),
            threading.Thread(target=self._hand_out, name="say", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request, read: Callable[[], None], size: int) -> None:
        """Takes a request, or raises. A request that was taken gets pieces through `respond`, and one end.

        `read` sets the tokens of its prompt, which has so many bytes, in another thread. There tenants take turns.
        """
        unread = Unread(request, read, max(1, size))
        for one in self._unread.offer(unread):
            full = QueueFull("too many prompts wait, and its tenant has the most: retry after 0.1 s")
            if one is unread:
                raise full
            self._refuse(one.request, full)

    def cancel(self, request: Request) -> None:
        """Ends a request soon. It still gets its end."""
        request.cancel()
        self._line.wake()

    @property
    def waiting(self) -> int:
        """The number of requests that have not started."""
        return len(self._unread) + len(self._line)

    def check(self) -> None:
        """Raises if no request would be answered: a thread has ended or does not get on, or the loop fails again and again."""
        for thread in self._threads:
            if not thread.is_alive():
                raise Internal(f"thread {thread.name!r} of the generator has ended: start the server again")
            since = self._since.get(thread.name)
            if since is not None and time.monotonic() - since > STUCK_SECONDS:
                raise Internal(
                    f"thread {thread.name!r} of the generator has not got on for more than {STUCK_SECONDS:g} s: "
                    "read the server's log"
                )
        if self.loop.device_failed:
            raise Internal("a step failed, and the device with it: start the server again")
        if (failures := self._failures) >= MOST_FAILURES:
            raise Internal(f"the loop of the generator has failed {failures} times in a row: read the server's log")

    def close(self, timeout: float) -> None:
        """Answers what was taken for `timeout` seconds at most, and ends the rest with an error."""
        deadline = time.monotonic() + timeout
        read, generate, say = self._threads
        self._unread.close()
        read.join(timeout)
        self._line.close()
        generate.join(max(0.0, deadline - time.monotonic()))
        self._abandoned.set()
        self._line.wake()
        read.join()
        generate.join()
        self._said.put(None)
        say.join(max(1.0, deadline - time.monotonic()))

    def _read(self) -> None:
        while (turn := self._unread.take(1)) is not None:
            taken, late = turn
            for one in late:
                self._refuse(one.request, DeadlineMissed.after(one.request.arrival_ns, one.deadline_ns))
            for one in taken:
                try:
                    self._at_work("read", partial(self._pass_on, one))
                except Exception as error:
                    if not isinstance(error, HplmError):
                        log.exception("cannot read a prompt")
                    self._refuse(one.request, for_client(error, "reading the prompt"))

    def _pass_on(self, unread: Unread) -> None:
        if self._abandoned.is_set():
            raise Draining("the server is shutting down: send the request again")
        request = unread.request
        if not request.cancelled:  # otherwise the loop ends it before it starts
            unread.read()
            self.loop.check(request)
        self._line.offer(Sequence(request), time.monotonic_ns())

    def _refuse(self, request: Request, error: HplmError) -> None:
        """Ends a request that the loop does not have."""
        request.ended = True
        self._said.put((request, error))

    def _generate(self) -> None:
        self._begin()
        while True:
            try:
                if self._abandoned.is_set():
                    self.loop.abandon()
                    break
                computed = self._at_work("generate", self.loop.step)
                self._failures = 0
                if computed:
                    continue
                waiting = len(self._line) + len(self.loop.running)
                if self._line.closed and not waiting:
                    break
                self._line.wait(WAITS if waiting else None)
            except Exception:
                self._failures += 1
                log.exception("the loop failed")
                time.sleep(PAUSE)

    def _hand_out(self) -> None:
        while (said := self._said.get()) is not None:
            request, piece = said
            try:
                self._at_work("say", partial(request.respond, piece))
            except Exception:
                log.exception("cannot send a piece: the request is cancelled")
                self.cancel(request)

    def _at_work(self, thread: str, work: Callable[[], T]) -> T:
        self._since[thread] = time.monotonic()
        try:
            return work()
        finally:
            del self._since[thread]
