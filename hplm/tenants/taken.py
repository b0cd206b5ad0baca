"""Asks running servers whether a change of the registry holds there, by the metrics that they publish."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Sequence

from hplm.clock import Clock
from hplm.errors import InvalidInput

GENERATION = "hplm_registry_generation"
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 5.0
_LABELS = re.compile(r"backbone=\"([^\"]*)\"")


def check_addresses(servers: Sequence[str]) -> None:
    for server in servers:
        if not re.fullmatch(r"(http://)?[^/\s]+:\d{1,5}", server):
            raise InvalidInput(f"--servers {server} is not an address: give HOST:PORT of its metrics, such as 127.0.0.1:8002")


def wait_until_taken(servers: Sequence[str], backbone: str, generation: int, until: float, clock: Clock = time) -> list[str]:
    """Waits until all servers (HOST:PORT of their metrics) have taken a generation. Returns those that have not by then.

    `until`: Unix time.
    """
    late = list(servers)
    while True:
        late = [server for server in late if taken(server, backbone) < generation]
        if not late or clock.time() >= until:
            return late
        clock.sleep(LOOK_SECONDS)


def taken(server: str, backbone: str) -> float:
    """Returns the oldest generation that the models of a backbone serve; -1 if the server does not say it."""
    lines = [line for line in published(server).splitlines() if line.startswith(f"{GENERATION}{{")]
    return min((float(line.rpartition(" ")[2]) for line in lines if _LABELS.findall(line) == [backbone]), default=-1)


def published(server: str) -> str:
    """Returns the metrics of a server (HOST:PORT of them); nothing if it does not answer."""
    host, _, port = server.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
