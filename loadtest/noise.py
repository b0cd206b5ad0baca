"""The ways in which a noisy tenant, or strangers without a key, misbehave beside a quiet tenant."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.encode import http_request, infer_request
from loadtest.generator import Load, measured
from loadtest.grpc_load import GrpcLoad
from loadtest.load import Report
from loadtest.strangers import CHUNKED, HALF_BODY, POLITE, SILENT, SLOW_HEADERS, TENANT, WHOLE, Strangers

DEADLINE_MS = 500
THROUGH_PROXY = 48  # connections: it lets an address have 64, of which earlier ones may still be closing
MOST_ADDRESSES = 250
CAPACITY_CONNECTIONS = 32
IN_FLIGHT = 2.0  # connections of the overload, as a multiple of the requests that it sends within their deadline
LONGEST = 100_000  # characters of a text that a server takes
LARGEST_ALLOWED = 16 * 1024 * 1024 - 1024  # bytes of a text that the proxy lets through
SLOW = (SILENT, SLOW_HEADERS, HALF_BODY)
ALIAS = "hplm"


@dataclass(frozen=True)
class Place:
    """The addresses that clients use: the proxy's if there is one, else the server's."""

    http: str
    grpc: str
    metrics: str
    direct: str  # the server's HTTP
    certificate: Path | None = None  # the proxy's

    def load(self, requests: Sequence[bytes], connections: int, sources: Sequence[str] = ()) -> Load:
        """Returns a load. Only behind the proxy, whose limits are per address, it has addresses of its own."""
        if self.certificate is None:
            return Load(self.http, requests, connections=connections)
        most = THROUGH_PROXY * max(1, len(sources))
        own: dict[str, Any] = {"certificate": self.certificate, "sources": sources}
        return Load(self.http, requests, connections=min(connections, most), **own)


@dataclass(frozen=True)
class Noise:
    """A load that misbehaves, and what is said of its report."""

    load: Load | GrpcLoad | Strangers
    said: Callable[[Any], dict[str, Any]] = dict


def timely(given: argparse.Namespace, tenant: str) -> bytes:
    """Returns a request with the quiet tenant's deadline."""
    return infer_request(given.backbone, [given.text], tenant, parameters={"timeout": 1000 * DEADLINE_MS})


def said(report: Report) -> dict[str, Any]:
    """Returns what became of requests with a deadline."""
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


def _answered(report: Report) -> dict[str, Any]:
    return {"answered": report.succeeded, "not_answered": dict(report.failures)}


def _statuses(report: Report) -> dict[str, Any]:
    return {str(status): count for status, count in report.by_status.items()} | dict(report.errors)


def _streams(given: argparse.Namespace, place: Place) -> Noise:
    """Many requests in flight over gRPC."""
    load = GrpcLoad(place.grpc, given.backbone, given.noisy, [given.text], given.streams)
    return Noise(replace(load, certificate=place.certificate, niceness=POLITE), vars)


def _long(given: argparse.Namespace, place: Place) -> Noise:
    """Requests of millions of characters."""
    text = (given.text + " ") * (LONGEST // (len(given.text) + 1) + 1)
    whole, rest = divmod(given.characters, LONGEST)
    texts = [text[:LONGEST]] * whole + ([text[:rest]] if rest else [])
    request = infer_request(given.backbone, texts, given.noisy, parameters={"truncate": True})
    return Noise(place.load([request], given.long), _answered)


def _words(given: argparse.Namespace, place: Place) -> Noise:
    """Texts of very many words."""
    request = infer_request(given.backbone, [" ".join(["a"] * given.words)], given.noisy, parameters={"truncate": True})
    return Noise(place.load([request], given.texts), _answered)


def _alias(given: argparse.Namespace, place: Place) -> Noise:
    """A flood through the alias."""
    return Noise(place.load([infer_request(ALIAS, [given.text], given.noisy)], given.flood), _answered)


def _flood(given: argparse.Namespace, place: Place) -> Noise:
    """A flood of short requests. `quota` sends the same, after a quota was set."""
    load = place.load([infer_request(given.backbone, [given.text], given.noisy)], given.flood)
    return Noise(replace(load, rate=given.noisy_rate), _answered)


def _overload(given: argparse.Namespace, place: Place) -> Noise:
    """Several times as many requests as the server can answer, with the quiet tenant's deadline."""
    request = infer_request(given.backbone, [given.text], given.noisy)
    # Without the proxy, which would limit this measurement as it limits the flood.
    closed = Load(place.direct, [request], seconds=given.seconds / 4, connections=CAPACITY_CONNECTIONS)
    full = measured(closed, "the capacity", closed.seconds)
    rate = given.overload * full.req_per_s
    connections = math.ceil(IN_FLIGHT * rate * DEADLINE_MS / 1000)  # with fewer, requests would wait for one
    load = place.load([timely(given, given.noisy)], connections, _sources(6, math.ceil(connections / THROUGH_PROXY)))
    capacity = {"capacity_per_s": round(full.req_per_s, 1)}
    return Noise(replace(load, rate=rate, undisturbed=True), lambda report: capacity | said(report))


def _sources(net: int, count: int) -> list[str]:
    """Returns client addresses. Each way has its own, because the proxy refuses an address for a while after an attack."""
    return [f"127.0.{net}.{number}" for number in range(1, min(count, MOST_ADDRESSES) + 1)]


def _strangers(
    given: argparse.Namespace,
    place: Place,
    kinds: Sequence[str],
    connections: int,
    sources: Sequence[str],
    body_bytes: int = 0,
) -> Noise:
    assert place.certificate is not None  # strangers come only with the proxy
    return Noise(Strangers(kinds, place.http, place.certificate, given.backbone, connections, sources, body_bytes))


def _unknown(given: argparse.Namespace, place: Place) -> Noise:
    """A flood of requests for paths, models and tenants that do not exist."""
    requests = [
        http_request("/v2/repository/index", b"{}"),
        infer_request(TENANT, [given.text], TENANT),
        infer_request(f"{given.backbone}-lookup", [given.text], given.quiet),
        infer_request(given.backbone, [given.text], TENANT),
        infer_request(ALIAS, [given.text], TENANT),
    ]
    return Noise(replace(place.load(requests, given.flood, _sources(5, 1)), connections=given.flood), _statuses)


Way = Callable[[argparse.Namespace, Place], Noise]
OF_TENANT: dict[str, Way] = {
    "streams": _streams,
    "long": _long,
    "alias": _alias,
    "words": _words,
    "overload": _overload,
    "no_quota": _flood,
    "quota": _flood,
}
OF_STRANGERS: dict[str, Way] = {
    # Bodies far larger than allowed, with their length and in chunks.
    "body": lambda given, place: _strangers(
        given, place, (WHOLE, CHUNKED), given.bodies, _sources(1, 1), 1_000_000 * given.body_mb
    ),
    # Bodies as large as is allowed, for a tenant that does not exist.
    "largest": lambda given, place: _strangers(given, place, (WHOLE,), given.bodies, _sources(2, 1), LARGEST_ALLOWED),
    # Connections that send nothing, a byte now and then, or half a request.
    "slow": lambda given, place: _strangers(given, place, SLOW, given.slow, _sources(3, 1)),
    # The same from many addresses, each of which stays below the limit.
    "slow_from_many": lambda given, place: _strangers(given, place, SLOW, given.slow, _sources(4, given.addresses)),
    "unknown": _unknown,
}
