"""The lookup half of a backbone as a service: requests wait in a line in which tenants take turns, for one thread.

If nobody waits, a short request is read by the thread that brings it. A long one waits as several pieces, so that it never
keeps the others waiting for long. Each request is answered exactly once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

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
LEARNING = 0.05  # rate of the running mean of the pace
LEAST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds after which a refused request may come again
PAUSE = 0.002  # seconds until it is asked again how many there are
WAITING = Limits(items=8192, work=1 << 27)  # the most pieces and characters that wait
REFUSED = Limits(items=8192, work=1 << 24)  # the most that have no place and whose refusals are not sent yet
Answered = tuple[LookupRequest, bytearray | Exception]


class Refused:
    """Keeps requests that are refused, but not told so at once. Threads may share it.

    Clients that do not wait before they ask again would take the time of those who have a place: a thousand refusals a second
    take most of two cores. So a refusal leaves for each request that is served, and at the latest when its client may come
    again. Its caller tells those that it returns.
    """

    def __init__(self, limits: Limits, now_ns: Callable[[], int]) -> None:
        """`limits`: of those that it keeps."""
        self._limits = limits
        self._now_ns = now_ns
        self._lock = threading.Lock()
        # Heap of (when it is told at the latest, order of arrival, its work, request).
        self._kept: list[tuple[int, int, int, LookupRequest]] = []
        self._arrivals = 0
        self._work = 0

    def keep(self, request: LookupRequest, until_ns: int) -> list[LookupRequest]:
        """Returns those for which it has no room."""
        with self._lock:
            self._arrivals += 1
            self._work += (work := request.remaining_work)
            heappush(self._kept, (until_ns, self._arrivals, work, request))
            leaving: list[LookupRequest] = []
            while len(self._kept) > self._limits.items or self._work > self._limits.work:
                leaving.append(self._take())
        return leaving

    def due(self, served: float) -> list[LookupRequest]:
        """Returns those whose time has come, and one for each request that was served."""
        with self._lock:
            now, leaving = self._now_ns(), list[LookupRequest]()
            while self._kept and (self._kept[0][0] <= now or len(leaving) < served):
                leaving.append(self._take())
        return leaving

    def _take(self) -> LookupRequest:
        *_, work, request = heappop(self._kept)
        self._work -= work
        return request


class LookupService:
    def __init__(
        self,
        lookup: Lookup,
        meter: Meter,
        quotas: Quotas,
        ahead: Callable[[], int] = lambda: 0,
        waiting: Limits = WAITING,
        refused: Limits = REFUSED,
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
        self._refused = Refused(refused, clock.monotonic_ns)
        self._pace = 0.0  # seconds from one piece that is looked up to the next while others wait, a running mean
        self._paced_since: float | None = None  # None: nobody waited
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
                if len(at_once) < room and (left := request.remaining_work) <= work:
                    at_once.append(request)
                    work -= left
                else:
                    later.append(request)
            if not at_once:
                break
            requests, room = later, room - len(at_once)
            self._look_up(at_once)
        return requests

    def _wait_in_line(self, request: LookupRequest) -> None:
        try:
            works = request.pieces(PIECE)
            request.in_pieces = len(works) > 1
            displaced = self._line.enqueue_item(request, *works)
        except Exception as error:  # the line is closed
            self._answer([(request, error)])
            return
        for refused in displaced:
            if refused.refuse_at_once:
                self._tell([refused])
                continue
            until_ns = self._time.monotonic_ns() + round(1e9 * self._waiting_s())
            self._tell(self._refused.keep(refused, min(until_ns, refused.deadline_ns or until_ns)))
        self._send_refusals(0)

    def _send_refusals(self, served: int) -> None:
        """Sends all if nobody waits, because the next turn may be far away."""
        self._tell(self._refused.due(served if len(self._line) else inf))

    def _tell(self, refused: Sequence[LookupRequest]) -> None:
        for request in refused:
            full = QueueFull(
                f"too many requests wait for lookup, most of them of tenant {request.tenant.id!r}: retry after "
                f"{self._waiting_s():.1f} s, or send fewer texts in a request"
            )
            self._answer([(request, full)])

    def _waiting_s(self) -> float:
        """Returns in how many seconds those who wait now are looked up, as far as one can tell."""
        return min(max(len(self._line) * self._pace, LEAST_PAUSE), LONGEST_PAUSE)

    def count(self, outcome: str, requests: int = 1) -> None:
        """Counts requests that are answered."""
        self.meter.add(names.LOOKUPS, requests, outcome)

    def look(self) -> None:
        """Updates the meter's levels, and sees whether the thread that looks up moves. Call it once a second."""
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
            self._send_refusals(0)
            self._time.sleep(PAUSE)
        turn = self._line.take(max(room, 1))
        if turn is None:
            return False
        taken, expired = turn
        self._expire(expired)
        started, finished = self._time.perf_counter(), 0
        try:
            with self._reading:
                finished = self._look_up(taken)
        finally:
            self._send_refusals(finished)
            self._keep_pace(started, len(taken))
        return True

    def _look_up(self, taken: list[LookupRequest]) -> int:
        """Reads a piece of each request and answers those that are finished. Returns how many that are."""
        started = self._working_since = self._time.perf_counter()
        try:
            answers = self._read(taken)
            self._answer(answers)
        finally:
            self._working_since = None
        self.meter.add(names.LOOKUP_SECONDS, self._time.perf_counter() - started)
        return len(answers)

    def _keep_pace(self, started: float, pieces: int) -> None:
        now, since = self._time.perf_counter(), self._paced_since or started
        if pieces:
            self._pace += LEARNING * ((now - since) / pieces - self._pace)
            since = now
        self._paced_since = since if len(self._line) else None

    def _expire(self, late: list[LookupRequest]) -> None:
        self._answer([(request, _late(request)) for request in late])

    def _read(self, taken: list[LookupRequest]) -> list[Answered]:
        """Returns the finished requests. Of the others pieces wait."""
        answers: list[Answered] = []
        allowed: list[LookupRequest] = []
        now_ns = self._time.monotonic_ns()
        for request in taken:
            try:
                if 0 < request.deadline_ns <= now_ns:
                    raise _late(request)
                self._quotas.check(request.tenant)  # requests before it in the line may have used up its texts or tokens
                allowed.append(request)
            except Exception as error:
                answers.append((request, error))
        try:
            found = self._lookup.read(allowed, PIECE)
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
            if error is not None and request.in_pieces:
                self._line.leave(request)
            try:
                error = request.respond(answer) or error
            except Exception:  # the others must still be answered
                log.exception("cannot send the result of a lookup")
            outcomes.append(names.PASSED_ON if error is None else word_of(error))
        for outcome in set(outcomes):
            self.count(outcome, outcomes.count(outcome))


def _late(request: LookupRequest) -> DeadlineMissed:
    return DeadlineMissed.after(request.head.arrival_ns, request.head.deadline_ns)
