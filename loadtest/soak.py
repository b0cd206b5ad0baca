"""Serves for a long time at a part of the capacity while tenants come and go, and shows what grows.

    python -m loadtest.soak --repository model_repository --minutes 30 --json

A copy of the repository is served by `hplm serve`. The rate is a share of what closed connections reach before. Memory and open
files of every process are compared between the time after the warm-up and the end, the p99 between the first and last windows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hplm.errors import HplmError
from loadtest.encode import infer_request
from loadtest.load import Load, Report, send
from loadtest.server import ServedCopy, add_options
from loadtest.texts import standard_library

CONNECTIONS = 64
CAPACITY_SECONDS = 10.0
CHURN_SECONDS = 5.0  # between a tenant's coming and its going
SAMPLE_SECONDS = 5.0
COMPARED = 6  # the first and the last of so many parts of the windows


class Sample(NamedTuple):
    at: float
    memory: dict[str, int]  # bytes of each process that it does not share
    files: dict[str, int]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--share", type=float, default=0.8, help="share of the capacity (default: 0.8)")
    add_options(parser)
    args = parser.parse_args(arguments)
    try:
        found = run(args)
    except HplmError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(name, value)
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hplm-soak-") as place:
        folder = Path(place)
        (folder / "state").mkdir()
        with ServedCopy(args.repository, folder, folder / "state", args.backbone) as served:
            return _soak(served, args.minutes * 60, args.share)


def _soak(served: ServedCopy, seconds: float, share: float) -> dict[str, Any]:
    texts, tenants = standard_library(), served.open_tenants()
    requests = [
        infer_request(served.backbone, [text[:400]], tenants[number % len(tenants)]) for number, text in enumerate(texts)
    ]
    full = _send(served, requests, CAPACITY_SECONDS, None)
    if not full.succeeded:
        full.expect_success("the capacity")
    rate = share * full.req_per_s  # refusals are quick, so they are no capacity
    watching = Watching(served)
    window = max(seconds / 30, 5.0)
    reports: list[Report] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end and watching.error is None:
        reports.append(_send(served, requests, window, rate))
        said = _p99(reports[-1:])
        print(f"{len(reports) * window:.0f} of {seconds:.0f} s, p99 {said} ms", file=sys.stderr, flush=True)
    watching.stop()
    part = max(1, len(reports) // COMPARED)
    first, last = _p99(reports[:part]), _p99(reports[-part:])
    statuses = np.concatenate([report.statuses for report in reports])
    return {
        "rate_per_s": round(rate, 1),
        "sent": len(statuses),
        "answered": int((statuses == 200).sum()),
        "failed": sum(sum(report.errors.values()) for report in reports),
        "guests": watching.guests,
        "p99_first_ms": first,
        "p99_last_ms": last,
        "p99_growth": round(last / first - 1, 3) if first and last else None,
        **_growth(watching.samples),
    }


def _send(served: ServedCopy, requests: Sequence[bytes], seconds: float, rate: float | None) -> Report:
    host, _, port = served.address.rpartition(":")
    return send(Load(host, int(port), list(requests), connections=CONNECTIONS, seconds=seconds, rate=rate))[0]


def _p99(reports: Sequence[Report]) -> float | None:
    served = np.concatenate([report.latencies[report.statuses == 200] for report in reports])
    return round(float(np.percentile(served, 99)) * 1000, 2) if len(served) else None


class Watching:
    """Samples the server's processes, and lets a tenant come and go, each in a thread."""

    def __init__(self, served: ServedCopy) -> None:
        self.samples: list[Sample] = []
        self.guests = 0
        self.error: Exception | None = None  # that ended one of the threads
        self._served = served
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._go_on, args=(step,)) for step in (self._sample, self._churn)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        if self.error is not None:
            raise HplmError(f"the run ended early, because the server could not be watched or changed: {self.error}")
        if not self.samples:
            raise HplmError(f"nothing was measured in less than {SAMPLE_SECONDS:g} s: give more --minutes")

    def _go_on(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # `stop` raises it
            self.error = error

    def _sample(self) -> None:
        while not self._ending.wait(SAMPLE_SECONDS):
            processes = self._served.processes()
            self.samples.append(
                Sample(
                    time.monotonic(),
                    {name: _private_bytes(pid) for name, pid in processes.items()},
                    {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in processes.items()},
                )
            )

    def _churn(self) -> None:
        while not self._ending.is_set():
            self._served.add_guest()
            self._ending.wait(CHURN_SECONDS)
            self._served.delete_guest()
            self.guests += 1


def _private_bytes(pid: int) -> int:
    """Returns the memory that only this process has: mapped tables are the page cache's."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


def _growth(samples: Sequence[Sample]) -> dict[str, Any]:
    """Compares the medians of the second sixth, after the warm-up, and of the last."""
    part = max(1, len(samples) // COMPARED)
    early, late = samples[part : 2 * part] or samples[:1], samples[-part:]
    names = early[0].memory.keys() & late[-1].memory.keys()

    def median(some: Sequence[Sample], field: str, name: str) -> float:
        return float(np.median([getattr(sample, field).get(name, 0) for sample in some]))

    return {
        "memory_mb": {name: round(median(late, "memory", name) / 1e6, 1) for name in sorted(names)},
        "memory_growth": {
            name: round(median(late, "memory", name) / max(1.0, median(early, "memory", name)) - 1, 4) for name in sorted(names)
        },
        "files_growth": {name: int(median(late, "files", name) - median(early, "files", name)) for name in sorted(names)},
    }


if __name__ == "__main__":
    sys.exit(main())
