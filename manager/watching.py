"""Reads how the replicas of a server are, from the metrics that they publish."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hplm.clock import Clock
from hplm.metrics import names
from hplm.metrics.names import ALIAS_REQUESTS, GENERATIONS, LOOKUPS, REQUESTS
from hplm.tenants.taken import published

SERIES = re.compile(r"^(hplm_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
OUTCOME = re.compile(r'outcome="(\w+)"')
SERVED = {names.PASSED_ON, "answered", "on_time", "late", "stop", "length", "cancelled"}  # outcomes that are no refusals
LEAST_SECONDS = 1.0  # between two looks that tell a rate: servers publish once a second
AT_ONCE = 16


class Watching:
    def __init__(self, servers: Sequence[str], clock: Clock = time) -> None:
        """`servers`: HOST:PORT of their metrics. A name of several hosts stands for all of them."""
        self._servers, self._clock = servers, clock
        self._before: dict[str, tuple[float, float]] = {}  # by replica: a look's time, and the requests until then

    def replicas(self) -> list[dict[str, Any]]:
        """Returns what each replica says now. Counts are from its start on; `rate`: requests a second since a look before."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._replica, [one for server in self._servers for one in _hosts(server)]))

    def _replica(self, server: str) -> dict[str, Any]:
        sums, refused, ages = defaultdict[str, float](float), Counter[str](), list[float]()
        now, late = self._clock.monotonic(), 0
        for name, labels, value in (series := SERIES.findall(published(server))):
            outcome, number = "".join(OUTCOME.findall(labels)), float(value)
            sums[name] += number
            if name == names.REGISTRY_AGE_SECONDS.name:
                ages.append(number)
            elif name in {one.name for one in (LOOKUPS, REQUESTS, GENERATIONS, ALIAS_REQUESTS)}:
                late += round(number) * (outcome == "late")
                if outcome not in SERVED:
                    refused[outcome] += round(number)
        rate = self._rate(server, now, sums[LOOKUPS.name] + sums[GENERATIONS.name]) if series else None
        return {
            "server": server, "answers": bool(series), "rate": rate, "late": late,
            "refused": +refused, "age": max(ages, default=None), "quarantined": round(sums[names.QUARANTINED_TENANTS.name]),
            "waiting": round(sums[names.WAITING_TEXTS.name] + sums[names.WAITING_SEQUENCES.name]),
        }  # fmt: skip

    def _rate(self, server: str, now: float, requests: float) -> float | None:
        """Returns the requests a second since the look before; None: there was none since the server's start."""
        then, before = self._before.get(server, (now, requests))
        if now - then >= LEAST_SECONDS or server not in self._before:
            self._before[server] = now, requests
        return (requests - before) / (now - then) if now > then and requests >= before else None


def _hosts(server: str) -> list[str]:
    host, _, port = server.removeprefix("http://").rpartition(":")
    try:
        return [f"{one}:{port}" for one in sorted(socket.gethostbyname_ex(host)[2])]
    except OSError:  # an unknown name does not answer
        return [server]
