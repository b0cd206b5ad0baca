"""Measures what others can take from a quiet tenant. They misbehave in several ways, one after the other.

    python -m loadtest.isolation --repository model_repository --backbone minilm \\
        --quiet stdlib-area --noisy maths-parameters

The quiet tenant sends ten requests a second, each with a deadline: first alone, then beside the noisy tenant. Without --noisy
it is beside strangers, who have no key. Of the others only `overload` has deadlines, so the server's count of requests in time
is that of the quiet tenant, and with `overload` that of both. With --door all requests go through the real HAProxy with
the files of deploy/haproxy, from several addresses.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hplm.errors import HplmError, InvalidInput
from loadtest.load import send
from loadtest.monitoring import PUBLISHED_AFTER, Growth, ServerCount, difference, total
from loadtest.noise import OF_STRANGERS, OF_TENANT, Addresses, Noise, Way, said, timely
from loadtest.proxy import HOST, reverse_proxy
from loadtest.server import ServedCopy, above_zero, at_least_one, command

WAYS = OF_TENANT | OF_STRANGERS
QUICK = "--backbone toy --quiet tenant-0 --noisy tenant-1 --text ba --seconds 0.5 --streams 100 --flood 4 --ways streams quota"
QUIET_ADDRESS, QUIET_CONNECTIONS = "127.0.0.2", 64  # enough for answers that take seconds
BEFORE_S, AFTER_S = 2.0, 3.0  # how long at most others misbehave before and after the quiet tenant's requests
LEAST_IN_TIME, MOST_TIMES_ALONE, MOST_DIFFERENCE, MOST_GROWTH_MB = 0.99, 5.0, 0.01, 50.0  # targets
WAITING = re.compile(r"^hplm_waiting_(?:texts|lookups)\{[^}]*\} (\S+)$", re.MULTILINE)
QUOTA_IN_FLIGHT = 2  # requests that `quota` lets the noisy tenant have
IDLE_S = 600.0  # the most time to wait for a server to finish what one way has left


def options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{_listed('a noisy tenant', OF_TENANT)}\n\n{_listed('strangers', OF_STRANGERS)}"
    add = parser.add_argument
    add("--door", action="store_true", help="ask through the reverse proxy, a real HAProxy")
    add("--at-once", type=at_least_one, help="requests that the proxy passes on at a time (default: the proxy's own)")
    add("--quiet", required=True, metavar="TENANT", help="tenant without a key that sends a few requests")
    add("--noisy", metavar="TENANT", help="tenant that misbehaves; with a tagger its long texts cost most")
    add("--text", default="the quick brown fox jumps over the lazy dog", help="text of the quiet tenant and of the floods")
    add("--rate", type=above_zero, default=10.0, help="requests a second of the quiet tenant (default: %(default)g)")
    add("--seconds", type=above_zero, default=20.0, help="seconds of each measurement (default: %(default)g)")
    add("--ways", nargs="+", choices=WAYS, metavar="WAY", help="see below (default: all of the noisy tenant, or of strangers)")
    add("--flood", type=at_least_one, default=64, help="connections of a flood (default: %(default)s)")
    add("--streams", type=at_least_one, default=10_000, help="streams: gRPC requests in flight (default: %(default)s)")
    add("--overload", type=above_zero, default=3.0, help="overload: multiple of the capacity to send (default: %(default)g)")
    add("--quota-rate", type=float, default=0.0, help="quota: requests a second, besides two in flight (default: no limit)")
    add("--slow", type=at_least_one, default=2000, help="slow: connections (default: %(default)s)")
    add("--body-mb", type=at_least_one, default=300, help="body: size of each (default: %(default)s)")
    add("--bodies", type=at_least_one, default=4, help="body, largest: connections (default: %(default)s)")


def _listed(who: str, ways: dict[str, Way]) -> str:
    return "\n".join([f"ways of {who}:", *(f"  {name:16}{way.about}" for name, way in ways.items())])


def _check(given: argparse.Namespace) -> None:
    """Chooses the ways that are not named. Raises if a way lacks an option."""
    if given.ways is None:
        if not given.noisy and not given.door:
            raise InvalidInput("nobody misbehaves: name a tenant with --noisy, or give --door for strangers")
        given.ways = [*(OF_TENANT if given.noisy else OF_STRANGERS)]
    for name in given.ways:
        if name in OF_TENANT and not given.noisy:
            raise InvalidInput(f"the way {name!r} is of a noisy tenant: name one with --noisy")
        if name in OF_STRANGERS and not given.door:
            raise InvalidInput(f"the way {name!r} is of strangers, who ask through the reverse proxy: give --door")


def run(given: argparse.Namespace, folder: Path, found: dict[str, Any]) -> None:
    _check(given)
    with ExitStack() as stack:
        server = stack.enter_context(ServedCopy(given.repository, folder, folder / "state", given.backbone))
        given.backbone = server.backbone
        is_open = server.open_tenants()
        asked = {given.quiet, *([given.noisy] if OF_TENANT.keys() & given.ways else [])}  # strangers need no noisy tenant
        if unknown := asked - {*is_open}:
            wanted = f"name tenants that answer without a key, such as {', '.join(is_open[:5])}"
            raise InvalidInput(f"--quiet or --noisy {', '.join(sorted(unknown))}: {wanted}")
        addresses, logs = Addresses(server.address, server.grpc, server.metrics, server.address), [server.log]
        sizes = {"shared_memory": server.shared_memory(), "log": lambda: sum(log.stat().st_size for log in logs)}
        if given.door:
            settings = {"HPLM_AT_ONCE": given.at_once} if given.at_once else {}
            proxy = stack.enter_context(
                reverse_proxy(folder / "door", addresses.http, addresses.grpc, given.backbone, **settings)
            )
            at = f"{HOST}:{proxy.port}"
            addresses = replace(addresses, http=at, grpc=at, certificate=proxy.certificate)
            logs.append(proxy.log)
        for name in given.ways:
            with _quota(given, server) if name == "quota" else nullcontext():
                found[name] = _measure(
                    given, addresses, WAYS[name].noise(given, addresses), Growth(sizes), name in OF_STRANGERS
                )
            _wait_until_idle(addresses.metrics)
    if not given.quick and (noticed := [name for name, way in found.items() if not way["holds"]]):
        raise HplmError(f"these ways do not hold: {', '.join(noticed)}")


@contextmanager
def _quota(given: argparse.Namespace, server: ServedCopy) -> Generator[None]:
    """Sets the noisy tenant's quota, and afterwards the one that it had before."""
    manager = server.manager()
    before = manager.current().find(given.noisy)

    def limit(in_flight: float, rate: float) -> None:
        manager.limit(given.noisy, in_flight=in_flight, rate=rate)
        manager.settle()

    limit(QUOTA_IN_FLIGHT, given.quota_rate)
    yield
    limit(before.in_flight, before.rate)


def _measure(
    given: argparse.Namespace, addresses: Addresses, noise: Noise, growth: Growth, of_strangers: bool
) -> dict[str, Any]:
    """Returns the quiet tenant's figures alone and beside the noise."""
    load = addresses.load([timely(given, given.quiet)], QUIET_CONNECTIONS, [QUIET_ADDRESS])
    quiet = replace(load, seconds=given.seconds, rate=given.rate, undisturbed=True)
    alone = said(*send(quiet))
    time.sleep(PUBLISHED_AFTER)  # otherwise the next count would have the last of these
    count = ServerCount(addresses.metrics, outcomes=("on_time",))
    before_s, after_s = min(BEFORE_S, given.seconds), min(AFTER_S, given.seconds)
    misbehaving, describe = noise
    lasting = replace(misbehaving, seconds=before_s + given.seconds + after_s)
    with growth:
        beside, others = send(replace(quiet, begin_s=before_s), lasting)
    return judged(alone, said(beside), describe(others), count.in_time(), growth.megabytes(), of_strangers)


def judged(
    alone: dict, beside: dict, others: dict, by_server: int, growth_mb: dict[str, float], of_strangers: bool
) -> dict[str, Any]:
    """Compares the quiet tenant beside others with the same alone, and the clients' count with the server's.

    `holds`: it noticed the others little enough, the counts agree, and strangers let neither memory nor logs grow.
    """
    times = beside["p99_ms"] / alone["p99_ms"] if alone["p99_ms"] and beside["p99_ms"] else None
    counts_more = difference(beside["in_time"] + others.get("in_time", 0), by_server)
    return {
        "alone": alone,
        "beside": beside,
        "p99_times_alone": times and round(times, 2),
        "in_time_by_server": by_server,
        "server_counts_more": round(counts_more, 4),
        **{f"{what}_growth_mb": megabytes for what, megabytes in growth_mb.items()},
        "strangers" if of_strangers else "noisy": others,
        "holds": beside["in_time_share"] >= LEAST_IN_TIME
        and times is not None
        and times <= MOST_TIMES_ALONE
        and abs(counts_more) <= MOST_DIFFERENCE
        and not (of_strangers and max(growth_mb.values(), default=0.0) > MOST_GROWTH_MB),
    }


def _wait_until_idle(metrics: str) -> None:
    """Waits until the server has no waiting texts, or raises, because the next figures would not be of the server alone."""
    end = time.monotonic() + IDLE_S
    while time.monotonic() < end:
        if not total(metrics, WAITING, IDLE_S):
            return
        time.sleep(1.0)
    raise HplmError(f"the server was still busy {IDLE_S:.0f} s after the load, so the next figures would not be of it alone")


main = partial(command, "isolation", __doc__, options, run, QUICK)

if __name__ == "__main__":
    sys.exit(main())
