"""Asks running servers whether a change of the registry holds there, by the metrics that they publish."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Sequence

from hplm.clock import Clock

GENERATION = "hplm_registry_generation"
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 5.0
_LABELS = re.compile(r"backbone=\"([^\"]*)\"")


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
    host, _, port = server.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode("utf-8", "replace").splitlines()
        own = [line for line in lines if line.startswith(f"{GENERATION}{{") and _LABELS.findall(line) == [backbone]]
        return min((float(line.rpartition(" ")[2]) for line in own), default=-1)
    except (OSError, ValueError, http.client.HTTPException):
        return -1
    finally:
        connection.close()
