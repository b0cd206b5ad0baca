"""A quiet tenant that sends a few requests a second with a deadline. Its answers are measured alone, and beside others."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.encode import infer_request
from loadtest.load import Load, Report, send

DEADLINE_MS = 500
QUIET_ADDRESS = "127.0.0.2"  # behind a front door, whose limits are per address; others come from another one
BEFORE_S = 2.0  # how long the noise lasts before anything is measured
AFTER_S = 3.0  # and after it: a process takes a while to start
LEAST_IN_TIME, MOST_TIMES_ALONE = 0.99, 5.0  # targets

Noise = Callable[[float], dict[str, Any]]  # misbehaves for so many seconds, and returns what became of it


def parser_of(module: str, described: str | None, ways: Iterable[str]) -> argparse.ArgumentParser:
    """Returns a parser with the options of every measurement of a quiet tenant."""
    parser = argparse.ArgumentParser(prog=module, description=described, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, ways = parser.add_argument, list(ways)
    add("--repository", type=Path, default=Path("model_repository"), help="repository to serve (default: %(default)s)")
    add("--backbone", required=True, help="name of the backbone")
    add("--quiet", required=True, metavar="TENANT", help="tenant without a key that sends a few requests")
    add("--text", default="the quick brown fox jumps over the lazy dog", help="text of the quiet tenant and of the floods")
    add("--rate", type=float, default=10.0, help="requests a second of the quiet tenant (default: %(default)g)")
    add("--seconds", type=float, default=20.0, help="seconds of each measurement (default: %(default)g)")
    add("--ways", nargs="+", choices=ways, default=ways, help="ways to misbehave (default: all)")
    add("--flood", type=int, default=64, help="connections of the flood (default: %(default)s)")
    add("--json", action="store_true", help="print one line of JSON")
    return parser


def finish(given: argparse.Namespace, measured: dict[str, dict], table: Callable[[dict[str, dict]], str]) -> None:
    """Prints what was measured. Ends the program with 1 if any way does not hold."""
    print(json.dumps(measured) if given.json else table(measured))
    if not all(way["holds"] for way in measured.values()):
        sys.exit(1)


def timely_request(backbone: str, text: str, tenant: str) -> bytes:
    """Returns a request with the quiet tenant's deadline."""
    return infer_request(backbone, [text], tenant, parameters={"timeout": 1000 * DEADLINE_MS})


def quiet_load(given: argparse.Namespace, host: str, port: int, connections: int, certificate: Path | None = None) -> Load:
    """`certificate`: that of the front door, if there is one."""
    request = timely_request(given.backbone, given.text, given.quiet)
    load = Load(host, port, [request], given.seconds, connections=connections, rate=given.rate, undisturbed=True)
    return load if certificate is None else replace(load, certificate=certificate, sources=[QUIET_ADDRESS])


def flooding(load: Load, told: Callable[[Report], dict[str, Any]]) -> Noise:
    """Sends a load for as long as the noise lasts. `told`: what is said of it."""
    return lambda seconds: told(send(replace(load, seconds=seconds))[0])


def in_time(report: Report) -> int:
    """Returns how many requests were answered by the deadline, by the client's clock."""
    return int((report.latencies[report.statuses == 200] * 1000 <= DEADLINE_MS).sum())


def said(report: Report) -> dict:
    good = report.latencies[report.statuses == 200] * 1000
    sent = len(report.statuses) + report.errors.total()
    return {
        "sent": sent,
        "in_time": in_time(report),
        "in_time_share": round(in_time(report) / sent, 4) if sent else 0.0,
        "p50_ms": round(float(np.percentile(good, 50)), 1) if len(good) else None,
        "p99_ms": round(float(np.percentile(good, 99)), 1) if len(good) else None,
        "sent_late_by_ms": round(1000 * report.lag_s, 1),
        "not_answered": dict(report.failures),
    }


def ask_beside(noise: Noise, ask: Callable[[], Report], seconds: float) -> tuple[dict, dict]:
    """Returns what became of the quiet tenant's requests, which take so many seconds, and of the noise around them."""
    with ThreadPoolExecutor(1) as pool:
        noisy = pool.submit(noise, BEFORE_S + seconds + AFTER_S)
        time.sleep(BEFORE_S)
        beside = said(ask())
        return beside, noisy.result()


def compared(alone: dict, beside: dict) -> dict:
    """Compares the quiet tenant's requests beside others with those alone. `holds`: it noticed the others little enough."""
    times = beside["p99_ms"] / alone["p99_ms"] if alone["p99_ms"] and beside["p99_ms"] else None
    return {
        "alone": alone,
        "beside": beside,
        "p99_times_alone": times and round(times, 2),
        "holds": beside["in_time_share"] >= LEAST_IN_TIME and times is not None and times <= MOST_TIMES_ALONE,
    }
