"""Watches a machine while loads are sent: what its server counts, who uses its cores, and what grows."""

from __future__ import annotations

import os
import re
import resource
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hplm.errors import HplmError
from hplm.metrics.publisher import SECONDS
from hplm.server.process_group import computed_ns, members

LOOK_S = 0.2


class Watch:
    """A context that measures from its beginning to its end.

    `groups`: process groups by the name of their part. `sizes`: functions that return bytes, by the name of what they measure.
    """

    def __init__(self, groups: Mapping[str, int], sizes: Mapping[str, Callable[[], int]]) -> None:
        self._groups, self._sizes = groups, sizes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._began, self._seconds, self._busy = time.monotonic(), self._computed(), _busy()
        self._before = self._most = self._measured()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def cores(self) -> dict[str, float]:
        """Returns how many cores each part, the `clients` and all `others` of this machine have used on average until now.

        Clients are processes that were started here, and that have ended.
        """
        wall = time.monotonic() - self._began
        used = {name: (seconds - self._seconds[name]) / wall for name, seconds in self._computed().items()}
        used["others"] = max(0.0, (_busy() - self._busy) / wall - sum(used.values()))
        return {name: round(cores, 2) for name, cores in used.items()}

    def growth_mb(self) -> dict[str, float]:
        """Returns how far each size grew at most."""
        return {name: round((most - self._before[name]) / 1e6, 1) for name, most in self._most.items()}

    def _look(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(LOOK_S)
            self._most = {name: max(self._most[name], size) for name, size in self._measured().items()}

    def _measured(self) -> dict[str, int]:
        return {name: size() for name, size in self._sizes.items()}

    def _computed(self) -> dict[str, float]:
        for name, group in self._groups.items():
            if not members(group):
                raise HplmError(f"the {name} has ended meanwhile: read its log")
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "clients": ended.ru_utime + ended.ru_stime,
            **{name: computed_ns(group) / 1e9 for name, group in self._groups.items()},
        }


def _busy() -> float:
    """Returns the seconds that the cores of this machine were busy since it started."""
    user, nice, system, _idle, _iowait, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


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
        with urllib.request.urlopen(f"http://{self._address}/metrics", timeout=5) as response:
            return round(sum(float(count) for count in self._counts.findall(response.read().decode())))


def difference(by_client: int, by_server: int) -> float:
    """Returns how many more requests the server counts than the client, as a share of the client's count."""
    return (by_server - by_client) / max(1, by_client)
