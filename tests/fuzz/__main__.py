"""Fuzzes all targets, or some, and prints what was found.

    python -m tests.fuzz --cases 100000 --json
    python -m tests.fuzz --cases 2000 --seed 7 grpc http-json

The targets on the wire share a server and a process, those on files another process, so that a crash is reported too. The same
seed and number give the same cases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fuzz import formats, messages, over_grpc, store_files, user_files, wire
from tests.fuzz.target import Target, run

ROOMS: dict[str, dict[str, type[Target]]] = {
    "wire": wire.TARGETS | over_grpc.TARGETS,
    "files": formats.TARGETS | store_files.TARGETS | messages.TARGETS | user_files.TARGETS,
}
TARGETS = {name: target for room in ROOMS.values() for name, target in room.items()}
LONGEST = 4000  # characters of a failure that are shown


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--cases", type=int, default=1000, help="cases, shared by the targets (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="beginning of the random cases (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    given = parser.parse_args()
    if unknown := [name for name in given.targets if name not in TARGETS]:
        parser.error(f"no target {unknown[0]!r}: choose {', '.join(TARGETS)}")
    names = given.targets or list(TARGETS)
    if given.here:
        _run_here(names, given.cases, given.seed)
        return
    weight = sum(TARGETS[name].weight for name in names)
    found: dict[str, dict[str, Any]] = {}
    for room in ROOMS.values():
        theirs = [name for name in names if name in room]
        if theirs:
            share = sum(TARGETS[name].weight for name in theirs) / weight
            found |= _run_apart(theirs, max(1, round(given.cases * share)), given.seed)
    failed = sum("failure" in one for one in found.values())
    if given.json:
        print(json.dumps({"cases": sum(one["cases"] for one in found.values()), "failed": failed, "targets": found}))
    else:
        print("\n".join(_line(name, one) for name, one in found.items()))
    sys.exit(failed > 0)


def _line(name: str, one: dict[str, Any]) -> str:
    failure = f"{one['failure']}\ncase: {one.get('case')}\n" if "failure" in one else "nothing found"
    return f"{name:14}{one['cases']:>9,} cases{one['seconds']:>8.0f} s  {failure}"


def _run_apart(names: list[str], cases: int, seed: int) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.fuzz", *names, "--here", "--cases", str(cases), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    found = {one.pop("name"): one for one in map(json.loads, done.stdout.splitlines())}
    if done.returncode:
        name = next((name for name in names if name not in found), names[-1])
        found[name] = {"cases": 0, "seconds": 0.0, "failure": f"it ended with {done.returncode}: {done.stderr[-LONGEST:]}"}
    return found


def _run_here(names: list[str], cases: int, seed: int) -> None:
    """Prints a line of JSON for each target."""
    weight = sum(TARGETS[name].weight for name in names)
    for name in names:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hplm-fuzz-") as folder:
            target = TARGETS[name](Path(folder))
            try:
                result = run(target, max(1, round(cases * target.weight / weight)), seed)
            finally:
                target.close()
        said = {"failure": result.failure[-LONGEST:], "case": repr(result.case)[:LONGEST]} if result.failure else {}
        seconds = round(time.monotonic() - started, 1)
        print(json.dumps({"name": name, "cases": result.cases, "seconds": seconds, **said}), flush=True)


if __name__ == "__main__":
    main()
