"""Tests in several processes: how many, how many threads each of them has, and which modules come first."""

from __future__ import annotations

import os

import hypothesis
import pytest

from builder.worker_processes import processes_that_fit

MOST = 8  # processes; with more, the longest module decides when all are done
BYTES_EACH = 3 << 30  # of a process with torch, and of the server that it has started
IN_PARALLEL = "PYTEST_XDIST_WORKER" in os.environ

if IN_PARALLEL:  # before torch is imported; servers inherit it
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # other processes need the cores while threads wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "2")  # two, so that kernels divide their work as they do in production

hypothesis.settings.register_profile("unhurried", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("unhurried")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return processes_that_fit(MOST, BYTES_EACH)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts modules by their number of slow tests. A process takes the next module, so quick ones must fill the end."""
    if not IN_PARALLEL:
        return
    slow: dict[str, int] = {}
    for item in items:
        module = item.nodeid.partition("::")[0]
        slow[module] = slow.get(module, 0) + (item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: -slow[item.nodeid.partition("::")[0]])
