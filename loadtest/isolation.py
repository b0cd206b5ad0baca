"""Measures what a tenant without limits can take from a quiet one. It misbehaves in several ways, one after the other.

    python -m loadtest.isolation --repository model_repository --backbone minilm --quiet acme --noisy beta --json

The quiet tenant sends ten requests a second, each with a deadline, from a process of its own: first alone, then beside the
other tenant, whose requests have no deadline. So the server's count of requests in time is that of the quiet tenant.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hplm.errors import HplmError
from hplm.server import TritonServer
from loadtest.encode import infer_request
from loadtest.generator import run_apart
from loadtest.report import Load, Report
from loadtest.server_count import PUBLISHED_AFTER, ServerCount, difference
from loadtest.streams import run_streams

ALIAS = "hplm"
DEADLINE_MS = 500
BEFORE_S = 2.0  # how long the noisy tenant sends before anything is measured
AFTER_S = 3.0  # and after it: a process takes a while to start
QUIET_CONNECTIONS = 64  # enough for answers that take seconds
LONGEST = 100_000  # characters of a text that a server takes
# Targets for the quiet tenant.
LEAST_IN_TIME, MOST_TIMES_ALONE, MOST_DIFFERENCE = 0.99, 5.0, 0.01
WAITING = re.compile(r"^hplm_waiting_(?:texts|lookups)\{[^}]*\} (\S+)$", re.MULTILINE)
IDLE_S = 600.0  # the most time to wait for a server to finish what one way has left

Noise = Callable[[float], dict[str, object]]  # misbehaves for so many seconds, and returns what became of it


@dataclass(frozen=True)
class Addresses:
    http: str
    grpc: str
    metrics: str


def main(arguments: list[str] | None = None) -> None:
    given = _parser().parse_args(arguments)
    try:
        with ExitStack() as open_until_done:
            if given.url:
                addresses = _addresses(given)
            else:
                server = open_until_done.enter_context(TritonServer(given.repository))
                addresses = Addresses(server.http_url, server.grpc_url, server.metrics_url)
            measured = measure(given, addresses)
    except (HplmError, OSError) as error:
        sys.exit(str(error))
    if given.json:
        print(json.dumps(measured))
    else:
        print(table(measured))
    if not all(way["holds"] for way in measured.values()):
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadtest.isolation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--repository", type=Path, default=Path("model_repository"), help="repository to serve (default: %(default)s)")
    add("--url", metavar="HOST:PORT", help="HTTP of a server that runs already; nobody else may use it meanwhile")
    add("--grpc", metavar="HOST:PORT", help="its gRPC (default: one port after --url)")
    add("--metrics", metavar="HOST:PORT", help="its metrics (default: two ports after --url)")
    add("--backbone", required=True, help="name of the backbone")
    add("--quiet", required=True, metavar="TENANT", help="tenant that sends a few requests")
    add("--noisy", required=True, metavar="TENANT", help="tenant that misbehaves; with a tagger its long texts cost most")
    add("--text", default="the quick brown fox jumps over the lazy dog", help="text of the quiet tenant and of the floods")
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="ways to misbehave (default: all)")
    add("--seconds", type=float, default=20.0, help="seconds of each measurement (default: %(default)g)")
    add("--rate", type=float, default=10.0, help="requests a second of the quiet tenant (default: %(default)g)")
    add("--streams", type=int, default=10_000, help="gRPC requests in flight (default: %(default)s)")
    add("--long", type=int, default=8, help="long requests in flight (default: %(default)s)")
    add("--characters", type=int, default=4_000_000, help="characters of a long request (default: %(default)s)")
    add("--flood", type=int, default=64, help="connections of the flood through the alias (default: %(default)s)")
    add("--texts", type=int, default=20, help="texts of many words in flight (default: %(default)s)")
    add("--words", type=int, default=50_000, help="words of each of them (default: %(default)s)")
    add("--json", action="store_true", help="print one line of JSON")
    return parser


def _addresses(given: argparse.Namespace) -> Addresses:
    host, _, port = given.url.removeprefix("http://").rpartition(":")
    if not host or not port.isdecimal():
        raise HplmError(f"--url {given.url!r}: give the address of Triton's HTTP, HOST:PORT")
    others = given.grpc or f"{host}:{int(port) + 1}", given.metrics or f"{host}:{int(port) + 2}"
    return Addresses(f"{host}:{port}", *others)


def measure(given: argparse.Namespace, addresses: Addresses) -> dict[str, dict]:
    """Returns the measurements of each way, with the quiet tenant alone just before it."""
    measured: dict[str, dict] = {}
    for name in given.ways:
        noise = WAYS[name](given, addresses)
        alone = _said(given, _quiet(given, addresses))
        time.sleep(PUBLISHED_AFTER)  # otherwise the next count would have the last of these
        count = ServerCount(addresses.metrics, outcomes=("on_time",))
        said: list[dict[str, object]] = []
        noisy = threading.Thread(target=lambda noise=noise, said=said: said.append(noise(BEFORE_S + given.seconds + AFTER_S)))
        noisy.start()
        time.sleep(BEFORE_S)
        beside = _said(given, _quiet(given, addresses))
        by_server = count.in_time()
        noisy.join()
        measured[name] = judged(alone, beside, by_server) | {"noisy": said[0] if said else "failed"}
        _wait_until_idle(addresses)
    return measured


def judged(alone: dict, beside: dict, by_server: int) -> dict:
    """Compares the quiet tenant's requests beside the noisy tenant with those alone, and with the server's count."""
    times = beside["p99_ms"] / alone["p99_ms"] if alone["p99_ms"] and beside["p99_ms"] else None
    counts_more = difference(beside["in_time"], by_server)
    return {
        "alone": alone,
        "beside": beside,
        "p99_times_alone": times and round(times, 2),
        "in_time_by_server": by_server,
        "server_counts_more": round(counts_more, 4),
        "holds": (
            beside["in_time_share"] >= LEAST_IN_TIME
            and times is not None
            and times <= MOST_TIMES_ALONE
            and abs(counts_more) <= MOST_DIFFERENCE
        ),
    }


def _quiet(given: argparse.Namespace, addresses: Addresses) -> Report:
    request = infer_request(given.backbone, [given.text], given.quiet, parameters={"timeout": 1000 * DEADLINE_MS})
    return run_apart(_load(addresses, request, QUIET_CONNECTIONS, given.seconds, rate=given.rate))


def _said(given: argparse.Namespace, report: Report) -> dict:
    good = report.latencies[report.statuses == 200] * 1000
    sent = len(report.statuses) + report.errors.total()
    in_time = int((good <= DEADLINE_MS).sum())
    return {
        "sent": sent,
        "in_time": in_time,
        "in_time_share": round(in_time / sent, 4) if sent else 0.0,
        "p50_ms": round(float(np.percentile(good, 50)), 1) if len(good) else None,
        "p99_ms": round(float(np.percentile(good, 99)), 1) if len(good) else None,
        "sent_late_by_ms": round(1000 * report.lag_s, 1),
        "not_answered": dict(report.failures),
    }


def _load(addresses: Addresses, request: bytes, connections: int, seconds: float, rate: float | None = None) -> Load:
    host, _, port = addresses.http.rpartition(":")
    return Load(host, int(port), [request], seconds=seconds, connections=connections, rate=rate)


def _streams(given: argparse.Namespace, addresses: Addresses) -> Noise:
    """Many requests in flight over gRPC."""
    return lambda seconds: dict(run_streams(addresses.grpc, given.backbone, given.noisy, given.text, given.streams, seconds))


def _long(given: argparse.Namespace, addresses: Addresses) -> Noise:
    """Requests of millions of characters."""
    text = (given.text + " ") * (LONGEST // (len(given.text) + 1) + 1)
    whole, rest = divmod(given.characters, LONGEST)
    texts = [text[:LONGEST]] * whole + ([text[:rest]] if rest else [])
    return _flooding(addresses, infer_request(given.backbone, texts, given.noisy, parameters={"truncate": True}), given.long)


def _alias(given: argparse.Namespace, addresses: Addresses) -> Noise:
    """A flood through the alias."""
    return _flooding(addresses, infer_request(ALIAS, [given.text], given.noisy), given.flood)


def _words(given: argparse.Namespace, addresses: Addresses) -> Noise:
    """Texts of very many words."""
    request = infer_request(given.backbone, [" ".join(["a"] * given.words)], given.noisy, parameters={"truncate": True})
    return _flooding(addresses, request, given.texts)


def _flooding(addresses: Addresses, request: bytes, connections: int) -> Noise:
    def flood(seconds: float) -> dict[str, object]:
        report = run_apart(_load(addresses, request, connections, seconds))
        return {"answered": report.succeeded, "not_answered": dict(report.failures)}

    return flood


WAYS = {"streams": _streams, "long": _long, "alias": _alias, "words": _words}


def _wait_until_idle(addresses: Addresses) -> None:
    end = time.monotonic() + IDLE_S
    while time.monotonic() < end:
        with urllib.request.urlopen(f"http://{addresses.metrics}/metrics", timeout=IDLE_S) as response:
            waiting = WAITING.findall(response.read().decode())
        if not any(map(float, waiting)):
            return
        time.sleep(1.0)


def table(measured: dict[str, dict]) -> str:
    lines = [f"{'way':10}{'in time':>9}{'p50 ms':>9}{'p99 ms':>9}{'alone':>9}{'p99 x':>7}{'server':>9}  noisy tenant"]
    for name, way in measured.items():
        alone, beside = way["alone"], way["beside"]
        lines.append(
            f"{name:10}{beside['in_time_share']:>9.1%}{beside['p50_ms'] or '-':>9}{beside['p99_ms'] or '-':>9}"
            f"{alone['p99_ms'] or '-':>9}{way['p99_times_alone'] or '-':>7}{way['server_counts_more']:>+9.1%}  {way['noisy']}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
