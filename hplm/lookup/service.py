"""The lookup half of a backbone as a service: requests wait in a line in which tenants take turns, for one thread.

If nobody waits, a short request is read by the thread that brings it. A long one waits as several pieces, so that it never
keeps the others waiting for long. Each request is answered exactly once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from hplm.clock import Clock
from hplm.errors import DeadlineMissed, Internal, QueueFull, word_of
from hplm.lookup.lookup import Lookup, LookupRequest
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.scheduling.limits import Limits
from hplm.scheduling.turns import Turns
from hplm.tenants.quotas import Quotas
from hplm.threads import Beats, repeat

log = logging.getLogger(__name__)
PIECE = 16_384  # characters that are read before the next tenant's turn: some milliseconds
AT_ONCE = 8192  # that a call of `submit` reads at a time: a tenth of a millisecond, or one if its words are new
AT_ONCE_SECONDS = 0.003  # after which a call of `submit` reads no more
SOON_SECONDS = 0.01  # that a call of `submit` waits for a turn to end, so that it may read
STUCK_SECONDS = 5  # a turn takes milliseconds
MOST_AHEAD = 1024  # looked-up requests without an answer: enough for a policy to choose from
PAUSE = 0.002  # seconds until it is asked again how many there are
WAITING = Limits(items=8192, work=1 << 27)  # the most pieces and characters that wait
RETRY_S = 1  # after which a refused request may come again: the least that the front door's Retry-After can say
Answered = tuple[LookupRequest, bytearray | Exception]


class LookupService:
    def __init__(
        self,
        lookup: Lookup,
        meter: Meter,
        quotas: Quotas,
        ahead: Callable[[], int] = lambda: 0,
        waiting: Limits = WAITING,
        soon_s: float = SOON_SECONDS,
        clock: Clock = time,
    ) -> None:
        """`ahead` says how many looked-up requests are not answered yet. Requests were counted with `Quotas.spend`."""
        self._ahead = ahead
        self._soon_s = soon_s
        self._time = clock
        self._lookup = lookup
        self.meter = meter
        self._quotas = quotas
        self._line: Turns[LookupRequest] = Turns(waiting, PIECE, clock.monotonic_ns)
        self._reading = threading.Lock()  # held by the thread that looks up
        self._answering = threading.Lock()  # held for a moment
        self._working_since: float | None = None
        self._beats = Beats()
        self._stuck: tuple[float | None, int] = None, 0  # the begin of the turn that was under way, and its beats
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> LookupService:
        """Starts the thread that looks up what waits."""
        self._thread = repeat(self.take_turn, "lookup")
        return self

    def submit(self, requests: Sequence[LookupRequest]) -> None:
        """Takes requests. Each is answered once, through its `respond`: before this returns, or else after its `defer`."""
        later = requests
        if requests and self._reading.acquire(timeout=self._soon_s):
            try:
                later = self._read_at_once(requests)
            finally:
                self._reading.release()
        for request in later:
            request.defer()
            self._wait_in_line(request)

    def _read_at_once(self, requests: Sequence[LookupRequest]) -> Sequence[LookupRequest]:
        """Reads short requests, some at a time, while nobody waits and it has time. Returns the others.

        To answer one that has waited costs more than to read it.
        """
        until, room = self._time.perf_counter() + AT_ONCE_SECONDS, MOST_AHEAD - self._ahead()
        while requests and not len(self._line) and not self._closing and self._time.perf_counter() < until:
            at_once: list[LookupRequest] = []  # a few short ones
            later: list[LookupRequest] = []
            work = AT_ONCE
            for request in requests:
                if len(at_once) < room and request.work <= work:
                    at_once.append(request)
                    work -= request.work
                else:
                    later.append(request)
            if not at_once:
                break
            requests, room = later, room - len(at_once)
            self._look_up(at_once)
        return requests

    def _wait_in_line(self, request: LookupRequest) -> None:
        try:
            displaced = self._line.enqueue_item(request, *request.divide(PIECE))
        except Exception as error:  # the line is closed
            self._answer([(request, error)])
            return
        self._answer([(refused, _full(refused)) for refused in displaced])

    def count(self, outcome: str, requests: int = 1) -> None:
        """Counts requests that are answered."""
        self.meter.add(names.LOOKUPS, requests, outcome)

    def look(self) -> None:
        """Updates the meter's gauges, and sees whether the thread that looks up moves. Call it once a second."""
        self.meter.set(names.WAITING_LOOKUPS, len(self._line))
        since = self._working_since
        self._stuck = since, self._beats.count([since] if since is not None else [])

    def check(self) -> None:
        """Raises if the thread that looks up does not move."""
        since, seconds = self._stuck
        if since is not None and since == self._working_since and seconds > STUCK_SECONDS:
            raise Internal(f"lookup has worked at its turn for more than {STUCK_SECONDS} s: read the server's log")

    def close(self) -> None:
        """Refuses new requests, and returns when the thread has answered the waiting ones."""
        self._closing = True
        self._line.close()
        if self._thread is not None:
            self._thread.join()

    def take_turn(self) -> bool:
        """Waits until somebody waits, and reads a piece of the next requests. Returns False when the service closes."""
        # Looked up now, more of them would only take time from those ahead. A turn takes no more than have room: after many at
        # once, a tenant with a single request would wait until as many are answered.
        while (room := MOST_AHEAD - self._ahead()) <= 0 and not self._closing:
            self._expire(self._line.expired())
            self._time.sleep(PAUSE)
        turn = self._line.take(max(room, 1))
        if turn is None:
            return False
        taken, expired = turn
        self._expire(expired)
        with self._reading:
            self._look_up(taken)
        return True

    def _look_up(self, taken: list[LookupRequest]) -> None:
        """Reads a piece of each request and answers those that are finished."""
        started = self._working_since = self._time.perf_counter()
        try:
            self._answer(self._read(taken))
        finally:
            self._working_since = None
        self.meter.add(names.LOOKUP_SECONDS, self._time.perf_counter() - started)

    def _expire(self, late: list[LookupRequest]) -> None:
        self._answer([(request, _late(request)) for request in late])

    def _read(self, taken: list[LookupRequest]) -> list[Answered]:
        """Returns the finished requests. Of the others pieces wait."""
        answers: list[Answered] = []
        allowed: list[LookupRequest] = []
        now_ns = self._time.monotonic_ns()
        for request in taken:
            if request.answered:  # after one of its other pieces
                continue
            try:
                if 0 < request.deadline_ns <= now_ns:
                    raise _late(request)
                self._quotas.check(request.tenant)  # requests before it in the line may have used up its texts or tokens
                allowed.append(request)
            except Exception as error:
                answers.append((request, error))
        try:
            found = self._lookup.read(allowed)
        except Exception as error:
            found = [error] * len(allowed)
        for request, answer in zip(allowed, found, strict=True):
            if answer is None:
                continue
            try:
                if isinstance(answer, bytearray):
                    self._quotas.check(request.tenant)  # again, because requests that were read with it are charged by now
                    self._quotas.charge(request.tenant, len(request.texts), request.tokens)
                answers.append((request, answer))
            except Exception as error:
                answers.append((request, error))
        return answers

    def _answer(self, answers: Sequence[Answered]) -> None:
        """Answers requests, and counts what their clients got."""
        outcomes: list[str] = []
        for request, answer in answers:
            with self._answering:  # another thread may have refused its other pieces
                was_answered, request.answered = request.answered, True
            if was_answered:
                continue
            error = answer if isinstance(answer, Exception) else None
            try:
                error = request.respond(answer) or error
            except Exception:  # the others must still be answered
                log.exception("cannot send the result of a lookup")
            outcomes.append(names.PASSED_ON if error is None else word_of(error))
        for outcome in set(outcomes):
            self.count(outcome, outcomes.count(outcome))


def _late(request: LookupRequest) -> DeadlineMissed:
    return DeadlineMissed.after(request.head.arrival_ns, request.head.deadline_ns)


def _full(request: LookupRequest) -> QueueFull:
    return QueueFull(
        f"too many requests wait for lookup, most of them of tenant {request.tenant.id!r}: retry after {RETRY_S} s, or send "
        "fewer texts in a request"
    )
