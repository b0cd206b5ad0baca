"""Sending loads. `send` runs each load in a process of its own, and all of them at the same time.

A client in the caller's process would be delayed by the caller's work, and would delay the other clients.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from typing import Any, Protocol

import numpy as np

from hplm.errors import HplmError

WAY_OUT = "read the server's log, then give the command again"
START_S = 60.0


class Sendable(Protocol):
    """A load of any kind. It and its report are pickled."""

    @property
    def limit_s(self) -> float:
        """The seconds within which `run` ends. `send` stops it later."""
        ...

    def run(self) -> Any:
        """Sends the requests, and returns the report."""
        ...


def send(*loads: Sendable, start_s: float = START_S) -> list[Any]:
    """Returns the reports of the loads, in their order. `start_s`: how long their processes may take to begin."""
    spawn = multiprocessing.get_context("spawn")
    all_there = spawn.Barrier(len(loads))
    processes, pipes = [], []
    try:
        for load in loads:
            ours, its = spawn.Pipe(duplex=False)
            process = spawn.Process(target=_run, args=(load, all_there, its, start_s), daemon=True)
            process.start()
            its.close()  # so that the end of the process is the end of the pipe
            processes.append(process)
            pipes.append(ours)
        reports = _received(pipes, start_s + max(load.limit_s for load in loads))
        return [reports[pipe] for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(load: Sendable, all_there: Barrier, its: Connection, start_s: float) -> None:
    all_there.wait(start_s)
    try:
        its.send(load.run())
    except HplmError as error:
        its.send(error)


def _received(pipes: Sequence[Connection], limit: float) -> dict[object, Any]:
    """Returns what came through each pipe. Raises at the first error, and where a process ends without a report."""
    reports: dict[object, Any] = {}
    end = time.monotonic() + limit
    while waiting := [pipe for pipe in pipes if pipe not in reports]:
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            raise HplmError(f"a load generator did not end within {limit:.0f} s and was stopped: try again")
        for pipe in waiting:
            if pipe not in ready:
                continue
            try:
                reports[pipe] = pipe.recv()
            except EOFError as error:
                raise HplmError("a load generator ended without a report: see its messages above") from error
            if isinstance(reports[pipe], HplmError):
                raise reports[pipe]
    return reports


def go_first() -> None:
    """On the machine that is measured, a client that waits for a core would count the wait as the server's."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


@dataclass
class Report:
    """The result of a load. `numbers`, `statuses`, `latencies` and `bodies` have an entry for each answer, in their order."""

    wall_s: float  # from the first request to the last answer
    cpu_s: float  # CPU time of the generator itself
    numbers: np.ndarray  # number of the answered request; 0 is the first one sent
    statuses: np.ndarray  # HTTP statuses
    latencies: np.ndarray  # seconds; in an open loop since the request was due, even if it was sent later
    lag_s: float  # the longest delay before sending a request that was due; 0 in a closed loop
    errors: Counter[str] = field(default_factory=Counter)  # requests without an answer, by kind of failure
    lost_connections: int = 0  # connections that broke and could not be opened again before the end
    bodies: list[bytes] = field(default_factory=list)  # only with `keep_bodies`

    @property
    def by_status(self) -> dict[int, int]:
        codes, counts = np.unique(self.statuses, return_counts=True)
        return dict(zip(codes.tolist(), counts.tolist(), strict=True))

    @property
    def succeeded(self) -> int:
        return self.by_status.get(200, 0)

    @property
    def failures(self) -> Counter[str]:
        """Failures by kind: a status other than 200, no answer, a connection that could not be opened again."""
        refused = {f"status {status}": count for status, count in self.by_status.items() if status != 200}
        return Counter(refused) + self.errors + Counter({"lost connection": self.lost_connections})

    def expect_success(self, of: str, way_out: str = WAY_OUT) -> None:
        """Raises if a request failed, for measurements that failures would make meaningless."""
        failures = self.failures
        if failures:
            what, count = failures.most_common(1)[0]
            raise HplmError(
                f"{of}: nothing was measured, because {failures.total():,} requests failed and {self.succeeded:,} succeeded. "
                f"Most failures are {what!r} ({count:,}): {way_out}"
            )
        if not self.succeeded:
            raise HplmError(f"{of}: nothing was measured, because no request was answered: measure for longer")

    def in_time(self, allowed_s: np.ndarray) -> np.ndarray:
        """Whether each answer is good and came in time. `allowed_s`: of each request, from when it was due."""
        return (self.statuses == 200) & (self.latencies <= allowed_s[self.numbers])

    @property
    def req_per_s(self) -> float:
        """Successful answers a second. Refusals do not count, because they are quick."""
        return self.succeeded / self.wall_s if self.succeeded else 0.0

    def percentile_ms(self, percent: float) -> float:
        """Returns a percentile of the latency of successful answers, or NaN if there are none."""
        good = self.latencies[self.statuses == 200]
        return float(np.percentile(good, percent)) * 1e3 if good.size else float("nan")
