"""A load generator that takes little CPU time from the server: one thread, non-blocking sockets, bytes built beforehand.

Programs call `loadtest.load.send`.
"""

from __future__ import annotations

import math
import select
import selectors
import ssl
import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import cast

import numpy as np

from hplm.clock import Clock
from hplm.errors import HplmError
from loadtest.connection import BadAnswer, Connection
from loadtest.load import WAY_OUT, Report, go_first, send

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
LONGEST_PAUSE = 0.1  # seconds between checks for requests without an answer
CONNECT_TIMEOUT = 2.0  # seconds
RECONNECTING_PAUSE = 0.002  # seconds between looks for a connection that was opened again
RETRY_PAUSE = 0.1  # seconds before connecting again
OPENERS = 4  # threads that connect again


@dataclass(frozen=True)
class Load:
    """The requests to send to a server, and their rate. It stops after `seconds` or after `count` requests.

    Without a rate the loop is closed: each connection sends its next request when the last one is answered, so the server sets
    the pace. With a rate the loop is open: request i is due i / rate seconds after the start (or at `arrivals[i]`), even if the
    server is slow. If no connection is idle, the request waits for one, and its latency includes the wait.
    """

    address: str  # HOST:PORT
    requests: Sequence[bytes]  # whole HTTP requests, sent in turn
    seconds: float = 10.0
    count: int = 1_000_000
    connections: int = 1
    rate: float | None = None  # requests a second
    arrivals: np.ndarray | None = None  # seconds after the start, ascending; makes the loop open
    patience: float = 30.0  # seconds that an answer may take, and the whole load beyond `seconds`
    keep_bodies: bool = False
    certificate: Path | None = None  # of a server that is asked over TLS
    sources: Sequence[str] = ()  # the client's own addresses, in turn; none: the system chooses one
    begin_s: float = 0.0  # how long to wait before connecting
    undisturbed: bool = False  # the generator goes before other processes, where the system allows it; for few requests

    def __post_init__(self) -> None:
        limits = (self.seconds, self.count, self.connections, self.patience, 1.0 if self.rate is None else self.rate)
        if not self.requests or not all(0 < limit < float("inf") for limit in limits):
            raise ValueError("a load needs requests, and limits that are finite and above 0")
        if self.rate is not None and self.arrivals is not None:
            raise ValueError("a load has a rate or arrivals, not both")

    @property
    def limit_s(self) -> float:
        return self.begin_s + self.seconds + 2 * self.patience

    def run(self) -> Report:
        if self.undisturbed:
            go_first()
        time.sleep(self.begin_s)
        return Generator(self).run()

    @property
    def due(self) -> np.ndarray | None:
        """The times at which the requests of an open loop are due, in seconds after the start."""
        if self.arrivals is not None:
            return self.arrivals[: np.searchsorted(self.arrivals, self.seconds)][: self.count]
        if self.rate is not None:
            return np.arange(min(self.count, math.ceil(self.seconds * self.rate))) / self.rate
        return None


def measured(load: Load, of: str, warm_up_s: float, way_out: str = WAY_OUT, warming: Sequence[bytes] = ()) -> Report:
    """Sends a load after it, or `warming`, has been sent for some seconds. Raises if a request failed."""
    send(replace(load, seconds=warm_up_s, requests=warming or load.requests))
    (report,) = send(load)
    report.expect_success(of, way_out)
    return report


class Generator:
    def __init__(self, load: Load, clock: Clock = time) -> None:
        self.load, self.clock, due = load, clock, load.due
        self.is_open = due is not None
        self.due = [] if due is None else due.tolist()
        self.planned = len(self.due) if self.is_open else load.count
        self.sent = 0
        self.lag = 0.0
        self.connected = count()
        self.openers = ThreadPoolExecutor(OPENERS)
        self.connecting = 0
        self.lost: set[object] = set()  # connections that could not be opened again, so far
        self.opened: deque[Connection] = deque()  # by the threads that connect again, for the thread that sends
        self.tls = None if load.certificate is None else ssl.create_default_context(cafile=load.certificate)
        self.selector = selectors.DefaultSelector()
        self.idle: deque[Connection] = deque()
        self.busy: set[Connection] = set()
        self.numbers, self.statuses, self.latencies = array("q"), array("i"), array("d")
        self.errors: Counter[str] = Counter()
        self.bodies: list[bytes] = []

    def run(self) -> Report:
        """Sends the load. Connects before the clock starts, so that handshakes are not measured."""
        try:
            self._connect_all()
            cpu_before = time.process_time()
            self.start = self.last_answer = self.clock.perf_counter()
            self.end = self.start + self.load.seconds + self.load.patience
            self._send_and_receive()
            return self._report(time.process_time() - cpu_before)
        finally:
            self.end = 0.0  # for the threads that connect again
            self.openers.shutdown()
            for connection in (*self.opened, *map(_connection, self.selector.get_map().values())):
                connection.socket.close()
            self.selector.close()

    def _send_and_receive(self) -> None:
        # An open loop also sends requests that are overdue because the server is slow. To skip them would flatter the server.
        send_until = self.end if self.is_open else self.start + self.load.seconds
        next_look = self.start + LONGEST_PAUSE
        while True:
            while self.opened:
                self.connecting -= 1
                self._add(self.opened.popleft())
            now = self.clock.perf_counter()
            if now < send_until:
                self._send_due()
            wants = now < send_until and self.sent < self.planned
            may_send = wants and bool(self.idle)
            if not (self.busy or may_send or (wants and self.connecting)):
                break
            pause = max(0.0, self._due(now) - now) if may_send else LONGEST_PAUSE
            for key, events in self._ready(min(pause, RECONNECTING_PAUSE if self.connecting else LONGEST_PAUSE)):
                self._serve(_connection(key), events)
            if now >= next_look:
                next_look = now + LONGEST_PAUSE
                self._give_up(now - self.load.patience if now < self.end else math.inf)
        if self.is_open and self.sent < self.planned:
            self.errors["unsent"] = self.planned - self.sent

    def _send_due(self) -> None:
        while self.idle and self.sent < self.planned:
            now = self.clock.perf_counter()
            due = self._due(now)
            if due > now:
                return
            self.lag = max(self.lag, now - due)
            connection = self.idle.popleft()
            self.busy.add(connection)
            connection.begin(self.sent, self.load.requests[self.sent % len(self.load.requests)], due, now)
            self.sent += 1
            try:
                if not connection.flush():
                    self.selector.modify(connection, READ | WRITE)
            except OSError:
                self._fail(connection, "reset")

    def _due(self, now: float) -> float:
        """Returns when the next request is due."""
        return self.start + self.due[self.sent] if self.is_open else now

    def _ready(self, pause: float) -> list[tuple[selectors.SelectorKey, int]]:
        if self.is_open:
            # `select.select` waits, because the selector rounds its timeout to whole milliseconds, and a request takes less.
            select.select([self.selector], [], [], pause)
            pause = 0.0
        return self.selector.select(pause)

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & WRITE and connection.flush():
                self.selector.modify(connection, READ)
            if events & READ and connection.receive():
                self._finish(connection)
        except BadAnswer:
            self._fail(connection, "malformed")
        except OSError:
            self._fail(connection, "reset")

    def _finish(self, connection: Connection) -> None:
        self.last_answer = self.clock.perf_counter()
        self.numbers.append(connection.number)
        self.statuses.append(connection.status)
        self.latencies.append(self.last_answer - connection.due)
        if self.load.keep_bodies:
            self.bodies.append(connection.body())
        self.busy.discard(connection)
        if connection.closes or connection.unsent:
            self._replace(connection)
        else:
            connection.clear()
            self.idle.append(connection)

    def _fail(self, connection: Connection, what: str) -> None:
        """Counts the request in flight as failed. A connection that breaks while idle is no failure."""
        if connection in self.busy:
            self.busy.discard(connection)
            self.errors[what] += 1
        else:
            self.idle.remove(connection)
        self._replace(connection)

    def _give_up(self, sent_before: float) -> None:
        for connection in [one for one in self.busy if one.sent_at < sent_before]:
            self._fail(connection, "timeout")

    def _connect_all(self) -> None:
        try:
            for _ in range(self.load.connections):
                self._add(self._new_connection())
        except OSError as error:
            raise HplmError(
                f"cannot open {self.load.connections} connections to {self.load.address} ({error}): start the server first"
            ) from error

    def _replace(self, connection: Connection) -> None:
        self.selector.unregister(connection)
        connection.socket.close()
        if self.clock.perf_counter() < self.end:
            self.connecting += 1
            self.openers.submit(self._open_again)

    def _open_again(self) -> None:
        """Connects in a thread of its own, again and again: a handshake may take seconds, and others must be sent meanwhile."""
        lost = object()
        while self.clock.perf_counter() < self.end:
            try:
                self.opened.append(self._new_connection())
                self.lost.discard(lost)
                return
            except OSError:
                self.lost.add(lost)
                self.clock.sleep(RETRY_PAUSE)

    def _add(self, connection: Connection) -> None:
        self.selector.register(connection, READ)
        self.idle.append(connection)

    def _new_connection(self) -> Connection:
        sources = self.load.sources
        source = sources[next(self.connected) % len(sources)] if sources else None
        return Connection(self.load.address, CONNECT_TIMEOUT, source, self.tls)

    def _report(self, cpu_s: float) -> Report:
        columns = map(np.array, (self.numbers, self.statuses, self.latencies))
        wall_s, lost = self.last_answer - self.start, len(self.lost)
        return Report(wall_s, cpu_s, *columns, lag_s=self.lag, errors=self.errors, lost_connections=lost, bodies=self.bodies)


def _connection(key: selectors.SelectorKey) -> Connection:
    return cast(Connection, key.fileobj)  # nothing else is registered
