"""What a server publishes at `/metrics`, read by tests."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from hplm.metrics import names
from hplm.metrics.names import REGISTRY_AGE_SECONDS, Histogram, Metric
from tests.support.wait import PATIENCE

LINE = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
PUBLISHED_TWICE = 2.2  # seconds
LABEL = re.compile(r'(\w+)="([^"]*)"')
HISTOGRAMS = [value for value in vars(names).values() if isinstance(value, Histogram)]
METRICS = [
    *(value for value in vars(names).values() if isinstance(value, Metric)),
    *(part for own in HISTOGRAMS for part in own.parts),
]
OF_DECODERS = {
    *(names.GENERATIONS, names.PROMISED, names.PROMPT_TOKENS, names.GENERATED_TOKENS, names.PUT_BACK, names.MISSING_WINDOWS),
    *(names.RUNNING_SEQUENCES, names.WAITING_SEQUENCES),
    *(names.CACHE_TOKENS, names.CACHE_ROOM, names.CACHE_SHARE),
    *(*names.FIRST_TOKEN_SECONDS.parts, *names.TOKEN_SECONDS.parts),
}
OF_ENGINES = {
    *(names.ENGINE_RESTARTS, names.LOST_REQUESTS, names.SUSPECTED_TENANTS, names.QUARANTINED_TENANTS),
    *names.ANSWER_SECONDS.parts,
}


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


def cancelled(server: Any) -> float:
    """Returns how many requests for generated text were cancelled."""
    return Scraped(server).of("hplm_generations_total", outcome="cancelled")


def settled(server: Any, counts: Mapping[str, float], before: Scraped | None = None) -> Scraped:
    """Returns the metrics once they have these counts and stand still: models publish once a second, series by series."""
    ends, seen, since = time.monotonic() + PATIENCE, Scraped(server, before), time.monotonic()
    while (found := {name: seen.of(name) for name in counts}) != dict(counts) or time.monotonic() - since < PUBLISHED_TWICE:
        assert time.monotonic() < ends, f"/metrics has not settled: {found}, where {dict(counts)} was expected"
        time.sleep(0.1)
        if (now := Scraped(server, before)).series != seen.series:
            seen, since = now, time.monotonic()
    return seen
