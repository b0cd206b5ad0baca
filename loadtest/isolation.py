"""Measures what a tenant without limits can take from a quiet one. It misbehaves in several ways, one after the other.

    python -m loadtest.isolation --repository model_repository --backbone minilm \\
        --quiet stdlib-area --noisy maths-parameters --json

The quiet tenant sends ten requests a second, each with a deadline, from a process of its own: first alone, then beside the
other tenant. Requests of the other have no deadline, except those of `overload`. So the server's count of requests in time is
that of the quiet tenant, and with `overload` that of both. With `--door` both ask through the real HAProxy with the files of
deploy/haproxy, from two addresses; the overload comes from as many as its connections need.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hplm.errors import HplmError
from hplm.server import TritonServer, process_group
from loadtest.encode import infer_request
from loadtest.load import Load, Report, send
from loadtest.processor import Pids, ProcessorTime
from loadtest.proxy import HOST, reverse_proxy
from loadtest.quiet import (
    DEADLINE_MS,
    Noise,
    ask_beside,
    compared,
    finish,
    flooding,
    parser_of,
    quiet_load,
    said,
    timely_request,
)
from loadtest.server_count import PUBLISHED_AFTER, ServerCount, difference
from loadtest.streams import Streams

ALIAS = "hplm"
QUIET_CONNECTIONS = 64  # enough for answers that take seconds
LONGEST = 100_000  # characters of a text that a server takes
CAPACITY_CONNECTIONS = 32
IN_FLIGHT = 2.0  # connections of the overload, as a multiple of the requests that it sends within their deadline
THROUGH_DOOR = 48  # connections: it lets an address have 64, of which earlier ones may still be closing
MOST_DIFFERENCE = 0.01  # of the counts of server and clients
WAITING = re.compile(r"^hplm_waiting_(?:texts|lookups)\{[^}]*\} (\S+)$", re.MULTILINE)
IDLE_S = 600.0  # the most time to wait for a server to finish what one way has left


@dataclass(frozen=True)
class Addresses:
    http: str
    grpc: str
    metrics: str
    certificate: Path | None = None  # the front door's, if there is one
    behind: Addresses | None = None  # without the door


def main(arguments: list[str] | None = None) -> None:
    given = _parser().parse_args(arguments)
    parts: dict[str, Pids] = {}
    try:
        with ExitStack() as open_until_done:
            if given.url:
                addresses = _addresses(given)
            else:
                server = open_until_done.enter_context(TritonServer(given.repository))
                parts["server"] = partial(process_group.members, server.pid or 0)
                addresses = Addresses(server.http_url, server.grpc_url, server.metrics_url)
            if given.door:
                folder = Path(open_until_done.enter_context(tempfile.TemporaryDirectory(prefix="hplm-isolation-")))
                settings = {"HPLM_AT_ONCE": given.at_once} if given.at_once else {}
                opened = reverse_proxy(folder, addresses.http, addresses.grpc, given.backbone, **settings)
                door = open_until_done.enter_context(opened)
                parts["door"] = lambda: [door.pid]
                port = f"{HOST}:{door.port}"
                addresses = Addresses(port, port, addresses.metrics, door.certificate, behind=addresses)
            measured = measure(given, addresses, parts)
    except (HplmError, OSError) as error:
        sys.exit(str(error))
    finish(given, measured, table)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("loadtest.isolation", __doc__, WAYS)
    add = parser.add_argument
    add("--url", metavar="HOST:PORT", help="HTTP of a server that runs already; nobody else may use it meanwhile")
    add("--grpc", metavar="HOST:PORT", help="its gRPC (default: one port after --url)")
    add("--metrics", metavar="HOST:PORT", help="its metrics (default: two ports after --url)")
    add("--door", action="store_true", help="ask through the front door, a real HAProxy")
    add("--noisy", required=True, metavar="TENANT", help="tenant that misbehaves; with a tagger its long texts cost most")
    add("--streams", type=int, default=10_000, help="gRPC requests in flight (default: %(default)s)")
    add("--long", type=int, default=8, help="long requests in flight (default: %(default)s)")
    add("--characters", type=int, default=4_000_000, help="characters of a long request (default: %(default)s)")
    add("--texts", type=int, default=20, help="texts of many words in flight (default: %(default)s)")
    add("--words", type=int, default=50_000, help="words of each of them (default: %(default)s)")
    add("--at-once", type=int, help="requests that the door passes on at a time (default: the door's own)")
    add("--overload", type=float, default=3.0, help="multiple of the capacity to send (default: %(default)g)")
    return parser


def _addresses(given: argparse.Namespace) -> Addresses:
    host, _, port = given.url.removeprefix("http://").rpartition(":")
    if not host or not port.isdecimal():
        raise HplmError(f"--url {given.url!r}: give the address of Triton's HTTP, HOST:PORT")
    others = given.grpc or f"{host}:{int(port) + 1}", given.metrics or f"{host}:{int(port) + 2}"
    return Addresses(f"{host}:{port}", *others)


def measure(given: argparse.Namespace, addresses: Addresses, parts: dict[str, Pids]) -> dict[str, dict]:
    """Returns the measurements of each way, with the quiet tenant alone just before it. `parts`: whose processes are known."""
    measured: dict[str, dict] = {}
    for name in given.ways:
        noise = WAYS[name](given, addresses)
        alone = said(_quiet(given, addresses))
        time.sleep(PUBLISHED_AFTER)  # otherwise the next count would have the last of these
        count = ServerCount(addresses.metrics, outcomes=("on_time",))
        processor = ProcessorTime(parts)
        beside, noisy = ask_beside(noise, lambda: _quiet(given, addresses), given.seconds)
        cores = processor.cores()
        measured[name] = judged(alone, beside, noisy, count.in_time()) | {"cores": cores}
        _wait_until_idle(addresses)
    return measured


def judged(alone: dict, beside: dict, noisy: dict, by_server: int) -> dict:
    """Compares the quiet tenant beside the noisy one with the same alone, and the counts of both clients with the server's."""
    found = compared(alone, beside)
    counts_more = difference(beside["in_time"] + noisy.get("in_time", 0), by_server)
    return {
        **found,
        "in_time_by_server": by_server,
        "server_counts_more": round(counts_more, 4),
        "noisy": noisy,
        "holds": found["holds"] and abs(counts_more) <= MOST_DIFFERENCE,
    }


def _quiet(given: argparse.Namespace, addresses: Addresses) -> Report:
    host, _, port = addresses.http.rpartition(":")
    connections = THROUGH_DOOR if addresses.behind else QUIET_CONNECTIONS
    return send(quiet_load(given, host, int(port), connections, addresses.certificate))[0]


def _load(addresses: Addresses, request: bytes, connections: int) -> Load:
    host, _, port = addresses.http.rpartition(":")
    connections = min(connections, THROUGH_DOOR) if addresses.behind else connections
    return Load(host, int(port), [request], connections=connections, certificate=addresses.certificate)


def _streams(given: argparse.Namespace, addresses: Addresses) -> Noise:
    """Many requests in flight over gRPC."""
    streams = Streams(addresses.grpc, given.backbone, given.noisy, given.text, given.streams, addresses.certificate)
    return lambda seconds: send(replace(streams, seconds=seconds))[0]


def _long(given: argparse.Namespace, addresses: Addresses) -> Noise:
    """Requests of millions of characters."""
    text = (given.text + " ") * (LONGEST // (len(given.text) + 1) + 1)
    whole, rest = divmod(given.characters, LONGEST)
    texts = [text[:LONGEST]] * whole + ([text[:rest]] if rest else [])
    request = infer_request(given.backbone, texts, given.noisy, parameters={"truncate": True})
    return flooding(_load(addresses, request, given.long), _answered)


def _alias(given: argparse.Namespace, addresses: Addresses) -> Noise:
    """A flood through the alias."""
    return flooding(_load(addresses, infer_request(ALIAS, [given.text], given.noisy), given.flood), _answered)


def _words(given: argparse.Namespace, addresses: Addresses) -> Noise:
    """Texts of very many words."""
    request = infer_request(given.backbone, [" ".join(["a"] * given.words)], given.noisy, parameters={"truncate": True})
    return flooding(_load(addresses, request, given.texts), _answered)


def _overload(given: argparse.Namespace, addresses: Addresses) -> Noise:
    """Several times as many requests as the server can answer, with the quiet tenant's deadline."""
    request = infer_request(given.backbone, [given.text], given.noisy)
    # Without the door, which would limit this measurement as it limits the flood.
    closed = replace(_load(addresses.behind or addresses, request, CAPACITY_CONNECTIONS), seconds=given.seconds / 4)
    send(closed)  # warms up
    (full,) = send(closed)
    full.expect_success("the capacity")
    capacity = full.req_per_s
    rate = given.overload * capacity
    connections = math.ceil(IN_FLIGHT * rate * DEADLINE_MS / 1000)  # with fewer, requests would wait for one
    load = _load(addresses, timely_request(given.backbone, given.text, given.noisy), connections)
    if addresses.behind:  # from as many addresses as the door lets these connections have
        sources = [f"127.0.1.{1 + number}" for number in range(math.ceil(connections / THROUGH_DOOR))]
        load = replace(load, connections=connections, sources=sources)
    timed = replace(load, rate=rate, undisturbed=True)
    return flooding(timed, lambda report: {"capacity_per_s": round(capacity, 1), **said(report)})


def _answered(report: Report) -> dict[str, Any]:
    return {"answered": report.succeeded, "not_answered": dict(report.failures)}


WAYS = {"streams": _streams, "long": _long, "alias": _alias, "words": _words, "overload": _overload}


def _wait_until_idle(addresses: Addresses) -> None:
    end = time.monotonic() + IDLE_S
    while time.monotonic() < end:
        with urllib.request.urlopen(f"http://{addresses.metrics}/metrics", timeout=IDLE_S) as response:
            waiting = WAITING.findall(response.read().decode())
        if not any(map(float, waiting)):
            return
        time.sleep(1.0)
    raise HplmError(f"the server was still busy {IDLE_S:.0f} s after the load, so the next figures would not be of it alone")


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
