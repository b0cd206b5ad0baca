"""Tests in several processes: how many, how many threads each of them has, and which modules come first."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from testing.processes import processes_that_fit

pytest_plugins = ["tests.support.failures", "tests.support.needed"]
pytest.register_assert_rewrite("tests")  # helpers say which values differ, as tests do
MOST = 8  # processes; with more, the longest module decides when all are done
BYTES_EACH = 3 << 30  # of a process with torch, and of the server that it has started
LONGEST_NAME = 80  # characters of a value in a test's name
IN_PARALLEL = "PYTEST_XDIST_WORKER" in os.environ
SLOW_AS_A_WHOLE = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.MULTILINE)

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # its fork handlers crash a child process if other threads use gRPC

# Before torch is imported. Servers inherit it: other processes need the cores while threads wait for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if IN_PARALLEL:
    os.environ.setdefault("OMP_NUM_THREADS", "2")  # two, so that kernels divide their work as they do in production

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; programs would inherit it and never end
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same cases in each run of CI, so that no change is refused for what an earlier one brought; others at each run by hand.
UNHURRIED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}  # neither looks at the clock
hypothesis.settings.register_profile("unhurried", derandomize=os.environ.get("CI") == "true", **UNHURRIED)
hypothesis.settings.load_profile("unhurried")
FOUND = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # whether, and not by how small an example: `tests/bite`
hypothesis.settings.register_profile("found", derandomize=True, phases=FOUND, **UNHURRIED)


def pytest_configure(config: pytest.Config) -> None:
    """Loads the fixtures of all tests, but not into a process that only gives tests to others: torch takes it seconds."""
    config.args.sort()  # pytest 9.1 loses the fixtures of a folder's conftest if it comes back to the folder after another
    if config.getoption("dist", "no") == "no":
        for name in ("shared", "servers", "ways"):
            config.pluginmanager.import_plugin(f"tests.support.{name}")


class ByGroup(LoadScopeScheduling):
    """Gives a process all tests of a module, and all tests that use one server, whichever modules they stand in."""

    def _split_scope(self, nodeid: str) -> str:
        test, _, server = nodeid.rpartition("@")  # pytest-xdist adds the group of a test's mark to its name
        return server if test and "]" not in server else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return ByGroup(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    waiting = "not slow" not in config.option.markexpr  # for servers, for a third of the time
    return processes_that_fit(MOST, BYTES_EACH, waiting)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of slow tests alone when only others are to run: what they import takes seconds."""
    if config.option.markexpr == "not slow" and collection_path.suffix == ".py":
        return SLOW_AS_A_WHOLE.search(collection_path.read_text("utf-8")) is not None or None
    return None


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names a long value by its beginning: some have a megabyte."""
    if isinstance(val, str | bytes) and len(val) > LONGEST_NAME:
        return ascii(val[:LONGEST_NAME])[:LONGEST_NAME]
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts modules by their number of slow tests. A process takes the next module, so quick ones must fill the end."""
    marks = {item: mark for item in items if (mark := item.get_closest_marker("server"))}
    servers = {item: mark.args[0] for item, mark in marks.items()}
    stopping = {item for item, mark in marks.items() if mark.kwargs.get("stops")}  # after all others that ask the server
    if not IN_PARALLEL:
        items.sort(key=lambda item: (servers.get(item, ""), item in stopping))  # each server is started once
        return
    slow: dict[str, int] = {}
    for item in items:
        if item in servers:
            item.add_marker(pytest.mark.xdist_group(servers[item]))
        module = item.nodeid.partition("::")[0]
        slow[module] = slow.get(module, 0) + (item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: (item in stopping, -slow[item.nodeid.partition("::")[0]]))


def pytest_collection_finish() -> None:
    """Lets collections of garbage look only at what tests make: what was imported is most of what there is."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says what did not run, and why. Each reason says how to run it."""
    told = [report.longrepr for report in terminalreporter.stats.get("skipped", [])]
    reasons = Counter(one[2].removeprefix("Skipped: ") for one in told if isinstance(one, tuple))
    lines = [f"{count:5d} skipped: {reason}" for reason, count in reasons.most_common()]
    if marks := config.option.markexpr:
        lines.append(f"Chosen by `-m '{marks}'`: without it, all tests run.")
    if lines:
        terminalreporter.section("not run", sep="-")
        for line in lines:
            terminalreporter.write_line(line)
