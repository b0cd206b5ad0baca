"""What a server publishes at `/metrics`, read by tests."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from hplm.metrics.names import REGISTRY_AGE_SECONDS
from tests.support.wait import PATIENCE

LINE = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')


class Scraped:
    """The series of hPLMs. `before`: what was published earlier, and is subtracted."""

    def __init__(self, server: Any, before: Scraped | None = None) -> None:
        with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=PATIENCE) as response:
            lines = response.read().decode().splitlines()
        self.series: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for line in lines:
            if line.startswith("hplm_") and not line.startswith(REGISTRY_AGE_SECONDS.name):  # it never stands still
                found = LINE.match(line)
                assert found, line
                key = found[1], tuple(sorted(LABEL.findall(found[2])))
                self.series[key] = float(found[3]) - (before.series.get(key, 0) if before else 0)

    def of(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's series that have these labels."""
        wanted = set(labels.items())
        return sum(value for (found, own), value in self.series.items() if found == name and wanted <= set(own))


def settled(server: Any, counts: Mapping[str, float], before: Scraped | None = None) -> Scraped:
    """Returns the metrics once they have these counts and no longer change, because models publish series one by one."""
    ends, seen, found = time.monotonic() + PATIENCE, list[Scraped](), dict[str, float]()
    while time.monotonic() < ends:
        seen = [*seen[-2:], Scraped(server, before)]
        found = {name: seen[-1].of(name) for name in counts}
        if found == dict(counts) and len(seen) == 3 and seen[0].series == seen[1].series == seen[2].series:
            return seen[-1]
        time.sleep(1.2)  # models publish once a second
    raise AssertionError(f"/metrics has not settled in {PATIENCE:g} s: {found}, where {dict(counts)} was expected")
