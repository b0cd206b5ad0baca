"""Watches a server while loads are sent: what it counts, and what grows."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence

from hplm.metrics.publisher import SECONDS

LOOK_S = 0.2


class Growth:
    """A context that measures how far sizes grow at most. `sizes`: functions that return bytes, by what they measure."""

    def __init__(self, sizes: Mapping[str, Callable[[], int]]) -> None:
        self._sizes, self._ended = sizes, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Growth:
        self._before = self._most = self._measured()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def megabytes(self) -> dict[str, float]:
        return {name: round((most - self._before[name]) / 1e6, 1) for name, most in self._most.items()}

    def _look(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(LOOK_S)
            self._most = {name: max(self._most[name], size) for name, size in self._measured().items()}

    def _measured(self) -> dict[str, int]:
        return {name: size() for name, size in self._sizes.items()}


IN_TIME = ("on_time", "answered", "stop", "length")  # outcomes; the second: without a deadline; the last two: of decoders
PUBLISHED_AFTER = 2 * SECONDS + 0.5  # seconds; then the last answers are in the metrics


class ServerCount:
    """Counts from now on. It counts all requests of the server, so nobody else may send any meanwhile.

    The client's count is what a user sees. The server's clock starts later, when lookup receives the request.
    """

    def __init__(self, address: str, outcomes: Sequence[str] = IN_TIME) -> None:
        """`address`: HOST:PORT of the server's metrics. Raises OSError if nobody answers there."""
        self._address = address
        pattern = rf'^hplm_(?:requests|generations)_total\{{[^}}]*outcome="(?:{"|".join(outcomes)})"[^}}]*\}} (\S+)$'
        self._counts = re.compile(pattern, re.MULTILINE)
        self._before = self._read()

    def in_time(self) -> int:
        """Returns how many requests the server has answered in time, once it has published its last counts."""
        time.sleep(PUBLISHED_AFTER)
        return self._read() - self._before

    def _read(self) -> int:
        return round(total(self._address, self._counts))


def total(address: str, series: re.Pattern[str], patience_s: float = 5.0) -> float:
    """Returns the sum of these series, as a server's metrics say now."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=patience_s) as response:
        return sum(map(float, series.findall(response.read().decode())))


def difference(by_client: int, by_server: int) -> float:
    """Returns how many more requests the server counts than the client, as a share of the client's count."""
    return (by_server - by_client) / max(1, by_client)
