"""Measures what strangers without a key can do to a quiet tenant through the front door. They misuse it in several ways.

    python -m loadtest.abuse --repository model_repository --backbone minilm --quiet stdlib-area --json

A repository is served behind the real HAProxy with the files of deploy/haproxy. The quiet tenant sends ten requests a second
through it, each with a deadline: first alone, then beside the strangers, who have other addresses of this machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hplm.errors import HplmError
from hplm.server import TritonServer
from hplm.server.process_group import SHARED_MEMORY
from hplm.server.stubs import size_of
from loadtest.encode import http_request, infer_request
from loadtest.load import Load, Report, send
from loadtest.proxy import HOST, Proxy, reverse_proxy
from loadtest.quiet import Noise, ask_beside, compared, finish, flooding, parser_of, quiet_load, said
from loadtest.strangers import CHUNKED, HALF_BODY, SILENT, SLOW_HEADERS, TENANT, WHOLE, Abuse

STRANGERS = [f"127.0.1.{number}" for number in range(1, 251)]
QUIET_CONNECTIONS = 32
LOOK_S = 0.2
MOST_GROWTH_MB = 50.0
LARGEST_ALLOWED = 16 * 1024 * 1024 - 1024  # bytes of a text that is let through
ALIAS = "hplm"


@dataclass(frozen=True)
class Place:
    given: argparse.Namespace
    server: TritonServer
    door: Proxy

    @property
    def load(self) -> Load:
        """The quiet tenant's."""
        return quiet_load(self.given, HOST, self.door.port, QUIET_CONNECTIONS, self.door.certificate)

    def abuse(self, kinds: Sequence[str], connections: int, addresses: int = 1, body_bytes: int = 0) -> Noise:
        abuse = Abuse(
            kinds=kinds,
            host=HOST,
            port=self.door.port,
            certificate=str(self.door.certificate),
            backbone=self.given.backbone,
            connections=connections,
            seconds=0.0,
            sources=STRANGERS[:addresses],
            body_bytes=body_bytes,
        )
        return lambda seconds: send(replace(abuse, seconds=seconds))[0]


def main(arguments: list[str] | None = None) -> None:
    given = _parser().parse_args(arguments)
    try:
        measured = measure(given)
    except (HplmError, OSError) as error:
        sys.exit(str(error))
    finish(given, measured, table)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("loadtest.abuse", __doc__, WAYS)
    add = parser.add_argument
    add("--slow", type=int, default=2000, help="slow connections (default: %(default)s)")
    add("--addresses", type=int, default=40, help="addresses of `slow_from_many` (default: %(default)s)")
    add("--body-mb", type=int, default=300, help="size of a huge body (default: %(default)s)")
    add("--bodies", type=int, default=4, help="connections that send bodies (default: %(default)s)")
    return parser


def measure(given: argparse.Namespace) -> dict[str, dict]:
    if not 1 <= given.addresses <= len(STRANGERS):
        raise HplmError(f"--addresses {given.addresses}: give 1 to {len(STRANGERS)}")
    with tempfile.TemporaryDirectory(prefix="hplm-abuse-") as name:
        folder = Path(name)
        with (
            TritonServer(given.repository, log_file=folder / "triton.log") as server,
            reverse_proxy(folder / "door", server.http_url, server.grpc_url, given.backbone) as door,
        ):
            place = Place(given, server, door)
            return {way: _measure(place, WAYS[way](place)) for way in given.ways}


def _measure(place: Place, noise: Noise) -> dict:
    alone = said(send(place.load)[0])
    with Growth(place) as growth:
        beside, strangers_said = ask_beside(noise, lambda: send(place.load)[0], place.given.seconds)
    return judged(alone, beside, growth.megabytes()) | {"strangers": strangers_said}


def judged(alone: dict, beside: dict, growth: dict[str, float]) -> dict:
    found = compared(alone, beside)
    return {
        **found,
        **{f"{what}_growth_mb": megabytes for what, megabytes in growth.items()},
        "holds": found["holds"] and max(growth.values()) <= MOST_GROWTH_MB,
    }


class Growth:
    """Measures how much the server's shared memory and the logs grow while the context is open."""

    def __init__(self, place: Place) -> None:
        self._server, self._logs = place.server, [place.server.log_file, place.door.log]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on)

    def __enter__(self) -> Growth:
        self._before = self._most = self._sizes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def megabytes(self) -> dict[str, float]:
        grown = [most - before for most, before in zip(self._most, self._before, strict=True)]
        return {what: round(size / 1e6, 1) for what, size in zip(("shared_memory", "log"), grown, strict=True)}

    def _look_on(self) -> None:
        last = False
        while not last:
            last = self._ended.wait(LOOK_S)
            self._most = tuple(map(max, self._most, self._sizes()))

    def _sizes(self) -> tuple[int, ...]:
        regions = SHARED_MEMORY.glob(f"{self._server.id}*")
        return sum(map(size_of, regions)), sum(log.stat().st_size for log in self._logs if log is not None)


def _body(place: Place) -> Noise:
    """Bodies far larger than allowed, with their length and in chunks."""
    return place.abuse((WHOLE, CHUNKED), place.given.bodies, body_bytes=1_000_000 * place.given.body_mb)


def _largest(place: Place) -> Noise:
    """Bodies as large as is allowed, for a tenant that does not exist."""
    return place.abuse((WHOLE,), place.given.bodies, body_bytes=LARGEST_ALLOWED)


def _slow(place: Place) -> Noise:
    """Connections that send nothing, a byte now and then, or half a request."""
    return place.abuse((SILENT, SLOW_HEADERS, HALF_BODY), place.given.slow)


def _slow_from_many(place: Place) -> Noise:
    """The same from many addresses, each of which stays below the limit."""
    return place.abuse((SILENT, SLOW_HEADERS, HALF_BODY), place.given.slow, place.given.addresses)


def _unknown(place: Place) -> Noise:
    """A flood of requests for paths, models and tenants that do not exist."""
    backbone, text = place.given.backbone, place.given.text
    requests = [
        http_request("/v2/repository/index", b"{}"),
        infer_request(TENANT, [text], TENANT),
        infer_request(f"{backbone}-lookup", [text], place.given.quiet),
        infer_request(backbone, [text], TENANT),
        infer_request(ALIAS, [text], TENANT),
    ]
    door, connections = place.door, place.given.flood
    load = Load(HOST, door.port, requests, connections=connections, certificate=door.certificate, sources=STRANGERS[:1])
    return flooding(load, _statuses)


def _statuses(report: Report) -> dict[str, int]:
    return {str(status): count for status, count in report.by_status.items()} | dict(report.errors)


WAYS: dict[str, Callable[[Place], Noise]] = {
    "body": _body,
    "largest": _largest,
    "slow": _slow,
    "slow_from_many": _slow_from_many,
    "unknown": _unknown,
}


def table(measured: dict[str, dict]) -> str:
    lines = [f"{'way':16}{'in time':>9}{'p99 ms':>9}{'alone':>9}{'p99 x':>7}{'memory MB':>11}{'log MB':>8}  strangers"]
    for name, way in measured.items():
        alone, beside = way["alone"], way["beside"]
        lines.append(
            f"{name:16}{beside['in_time_share']:>9.1%}{beside['p99_ms'] or '-':>9}{alone['p99_ms'] or '-':>9}"
            f"{way['p99_times_alone'] or '-':>7}{way['shared_memory_growth_mb']:>11}{way['log_growth_mb']:>8}"
            f"  {way['strangers']}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
