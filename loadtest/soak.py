"""Serves for a long time at a part of the capacity while tenants come and go, and shows what grows.

    python -m loadtest.soak --repository model_repository --minutes 30 --json

A copy of the repository is served by `hplm serve`. The rate is a share of what closed connections reach before. Memory and open
files of every process are compared between the time after the warm-up and the end, the p99 between the first and last windows.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hplm.errors import HplmError
from loadtest.encode import infer_request
from loadtest.generator import Load
from loadtest.load import Report, send
from loadtest.server import ServedCopy, above_zero, command
from loadtest.texts import standard_library

QUICK = "--minutes 0.02 --share 0.1"
CONNECTIONS = 64
CAPACITY_SECONDS = 10.0  # at most
CHURN_SECONDS = 5.0  # between a tenant's coming and its going
COMPARED = 6  # the first and the last of so many parts of the windows


# The bytes that each process does not share, and its open files.
Sample = dict[str, tuple[int, int]]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=above_zero, default=30.0, help="how long (default: %(default)g)")
    parser.add_argument("--share", type=above_zero, default=0.8, help="share of the capacity (default: %(default)g)")


def run(given: argparse.Namespace, folder: Path, found: dict[str, Any]) -> None:
    with ServedCopy(given.repository, folder, folder / "state", given.backbone) as served:
        found |= soaked(served, standard_library(), given.minutes * 60, given.share)
    if found["failed"]:
        raise HplmError(f"{found['failed']:,} requests failed")
    if found["p99_last_ms"] is None:
        raise HplmError("at the end the server answered nothing: read its log")


def soaked(served: ServedCopy, texts: Sequence[str], seconds: float, share: float) -> dict[str, Any]:
    tenants = itertools.cycle(served.open_tenants())
    requests = [infer_request(served.backbone, [text[:400]], next(tenants)) for text in texts]
    load = Load(served.address, requests, seconds=min(CAPACITY_SECONDS, seconds), connections=CONNECTIONS)
    (full,) = send(load)
    if not full.succeeded:
        full.expect_success("the capacity")
    rate = share * full.req_per_s  # refusals are quick, so they are no capacity
    window = replace(load, seconds=min(seconds, max(seconds / 30, 5.0)), rate=rate)
    reports, samples, guests = _beside_guests(served, window, seconds)
    part = max(1, len(reports) // COMPARED)
    first, last = _p99(reports[:part]), _p99(reports[-part:])
    return {
        "rate_per_s": round(rate, 1),
        "sent": sum(len(report.statuses) for report in reports),
        "answered": sum(report.succeeded for report in reports),
        "failed": sum(report.errors.total() for report in reports),
        "guests": guests,
        "p99_first_ms": first,
        "p99_last_ms": last,
        "p99_growth": round(last / first - 1, 3) if first and last else None,
        **growth(samples),
    }


def _p99(reports: Sequence[Report]) -> float | None:
    served = np.concatenate([report.latencies[report.statuses == 200] for report in reports])
    return round(float(np.percentile(served, 99)) * 1000, 2) if len(served) else None


def _beside_guests(served: ServedCopy, window: Load, seconds: float) -> tuple[list[Report], list[Sample], int]:
    """Sends window after window while a tenant comes and goes.

    Returns the reports, what the processes take after each window, and how often the tenant has come and gone.
    """
    reports: list[Report] = []
    samples: list[Sample] = []
    ending = threading.Event()
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(1) as pool:
        guests = pool.submit(_guests, served, ending)
        try:
            while not samples or (time.monotonic() < end and not guests.done()):
                reports += send(window)
                samples.append({name: _taken(pid) for name, pid in served.processes().items()})
                took = len(reports) * window.seconds
                print(f"{took:.0f} of {seconds:.0f} s, p99 {_p99(reports[-1:])} ms", file=sys.stderr, flush=True)
        finally:
            ending.set()
        count = guests.result()  # raises the error of a change
    return reports, samples, count


def _guests(served: ServedCopy, ending: threading.Event) -> int:
    count = 0
    while not ending.is_set():
        served.add_guest()
        ending.wait(CHURN_SECONDS)
        served.delete_guest()
        count += 1
    return count


def _taken(pid: int) -> tuple[int, int]:
    """Returns the memory that only this process has, because mapped tables are the page cache's, and its open files."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    private = next(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))
    return private, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def growth(samples: Sequence[Sample]) -> dict[str, Any]:
    """Compares the medians of the second sixth, after the warm-up, and of the last."""
    part = max(1, len(samples) // COMPARED)
    early, late = samples[part : 2 * part] or samples[:1], samples[-part:]
    found: dict[str, Any] = {"memory_mb": {}, "memory_growth": {}, "files_growth": {}}
    for name in sorted(early[0].keys() & late[-1].keys()):
        memory, files = np.median([sample[name] for sample in early if name in sample], axis=0)
        memory_late, files_late = np.median([sample[name] for sample in late if name in sample], axis=0)
        found["memory_mb"][name] = round(memory_late / 1e6, 1)
        found["memory_growth"][name] = round(memory_late / max(1.0, memory) - 1, 4)
        found["files_growth"][name] = int(files_late - files)
    return found


main = partial(command, "soak", __doc__, options, run, QUICK)

if __name__ == "__main__":
    sys.exit(main())
