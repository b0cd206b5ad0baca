"""The ways in which a noisy tenant, or strangers without a key, misbehave beside a quiet tenant."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

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
LONG_TEXTS, LONG_REQUESTS = 40, 8  # texts of a long request, and such requests in flight
WORDS, WORDY_REQUESTS = 50_000, 20  # of a text of many words, and such requests in flight
ADDRESSES = 40  # of `slow_from_many`
LARGEST_ALLOWED = 16 * 1024 * 1024 - 1024  # bytes of a text that the proxy lets through
SLOW = (SILENT, SLOW_HEADERS, HALF_BODY)
ALIAS = "hplm"


@dataclass(frozen=True)
class Addresses:
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


Said = Callable[[Any], dict[str, Any]]  # what is said of a report
Noise = tuple[Load | GrpcLoad | Strangers, Said]


class Way(NamedTuple):
    about: str  # for the help
    noise: Callable[[argparse.Namespace, Addresses], Noise]


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


def _flood(given: argparse.Namespace, addresses: Addresses, model: str = "") -> Noise:
    return addresses.load([infer_request(model or given.backbone, [given.text], given.noisy)], given.flood), _answered


def _truncated(given: argparse.Namespace, addresses: Addresses, texts: Sequence[str], in_flight: int) -> Noise:
    request = infer_request(given.backbone, texts, given.noisy, parameters={"truncate": True})
    return addresses.load([request], in_flight), _answered


def _sources(net: int, count: int = 1) -> list[str]:
    """Returns client addresses. Each way has its own, because the proxy refuses an address for a while after an attack."""
    return [f"127.0.{net}.{number}" for number in range(1, min(count, MOST_ADDRESSES) + 1)]


def _streams(given: argparse.Namespace, addresses: Addresses) -> Noise:
    load = GrpcLoad(addresses.grpc, given.backbone, given.noisy, [given.text], given.streams)
    return replace(load, certificate=addresses.certificate, niceness=POLITE), vars


def _long(given: argparse.Namespace, addresses: Addresses) -> Noise:
    text = ((given.text + " ") * (LONGEST // len(given.text)))[:LONGEST]
    return _truncated(given, addresses, [text] * LONG_TEXTS, LONG_REQUESTS)


def _overload(given: argparse.Namespace, addresses: Addresses) -> Noise:
    request = infer_request(given.backbone, [given.text], given.noisy)
    # Without the proxy, which would limit this measurement as it limits the flood.
    closed = Load(addresses.direct, [request], seconds=given.seconds / 4, connections=CAPACITY_CONNECTIONS)
    full = measured(closed, "the capacity", closed.seconds)
    rate = given.overload * full.req_per_s
    connections = math.ceil(IN_FLIGHT * rate * DEADLINE_MS / 1000)  # with fewer, requests would wait for one
    load = addresses.load([timely(given, given.noisy)], connections, _sources(6, math.ceil(connections / THROUGH_PROXY)))
    capacity = {"capacity_per_s": round(full.req_per_s, 1)}
    return replace(load, rate=rate, undisturbed=True), lambda report: capacity | said(report)


def _strangers(
    given: argparse.Namespace, addresses: Addresses, kinds: Sequence[str], sources: Sequence[str], size: int = 0
) -> Noise:
    assert addresses.certificate is not None  # strangers come only with the proxy
    connections = given.bodies if size else given.slow
    return Strangers(kinds, addresses.http, addresses.certificate, given.backbone, connections, sources, size), dict


def _unknown(given: argparse.Namespace, addresses: Addresses) -> Noise:
    asked = (TENANT, TENANT), (f"{given.backbone}-lookup", given.quiet), (given.backbone, TENANT), (ALIAS, TENANT)
    requests = [http_request("/v2/repository/index", b"{}"), *(infer_request(one, [given.text], who) for one, who in asked)]
    load = replace(addresses.load(requests, given.flood, _sources(5)), connections=given.flood)
    return load, lambda report: {str(status): count for status, count in report.by_status.items()} | dict(report.errors)


OF_TENANT = {
    "streams": Way("gRPC requests in flight; one that is refused comes again when the refusal says", _streams),
    "long": Way("requests of millions of characters", _long),
    "alias": Way("a flood through the model `hplm`", lambda given, addresses: _flood(given, addresses, ALIAS)),
    "words": Way(
        "texts of very many words; with a tagger, answers have as many rows",
        lambda given, addresses: _truncated(given, addresses, [" ".join(["a"] * WORDS)], WORDY_REQUESTS),
    ),
    "overload": Way("several times as many requests as the server can answer, with the quiet tenant's deadline", _overload),
    "no_quota": Way("a flood of short requests", _flood),
    "quota": Way("the same, after a quota was set", _flood),
}
OF_STRANGERS = {
    "body": Way(
        "bodies far larger than allowed, with their length or in chunks",
        lambda given, addresses: _strangers(given, addresses, (WHOLE, CHUNKED), _sources(1), 1_000_000 * given.body_mb),
    ),
    "largest": Way(
        "the largest bodies that are allowed, for a tenant that does not exist",
        lambda given, addresses: _strangers(given, addresses, (WHOLE,), _sources(2), LARGEST_ALLOWED),
    ),
    "slow": Way(
        "connections of one address that send nothing, a byte of a header now and then, or half a body",
        lambda given, addresses: _strangers(given, addresses, SLOW, _sources(3)),
    ),
    "slow_from_many": Way(
        "the same from many addresses, each below its limit of connections",
        lambda given, addresses: _strangers(given, addresses, SLOW, _sources(4, ADDRESSES)),
    ),
    "unknown": Way("a flood for paths, models and tenants that do not exist", _unknown),
}
