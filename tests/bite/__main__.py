"""`python -m tests.bite`: puts faults into a scratch copy of the tree, one at a time, and says which of them tests find."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.bite.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
ENDED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - (.*))?$", re.MULTILINE)
QUICK, SLOW = ("-m", "not slow"), ("-m", "slow")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bite", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the faults and which are stale, and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults, or those of these groups")
    parser.add_argument("--quick", action="store_true", help="no slow tests")
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS", help="of a fault's tests (default %(default)g)"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it too ends the running tests
    wanted = set(args.only or [])
    faults = [fault for fault in FAULTS if not wanted or wanted & {fault.name, fault.group}]
    if unknown := wanted - {name for fault in FAULTS for name in (fault.name, fault.group)}:
        parser.error(f"no fault and no group has the name {', '.join(sorted(unknown))}: see --list")
    if args.list:
        stale = {fault.name: said for fault in faults if (said := fault.stale(ROOT))}
        for fault in faults:
            print(f"{fault.name:<40} {' '.join(fault.rooms):<24} {fault.breaks}")
        print("", *stale.values(), f"{len(stale)} of {len(faults)} stale", sep="\n")
        return int(bool(stale))
    outcomes = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="hplm-bite-") as folder:
        copy_tree(copy := Path(folder, "tree"))
        for fault in faults:
            began = time.monotonic()
            outcome, *said = bite(fault, copy, began + args.limit, [QUICK] if args.quick else [QUICK, SLOW])
            outcomes[outcome] += 1
            # Below an outcome stand the test that found the fault, and what it said in its first line.
            print(f"{outcome:<7}{time.monotonic() - began:>6.0f} s  {fault.name}", *said, sep=f"\n{'':<17}", flush=True)
    print(f"\nfound {outcomes['found']} of {len(faults)}")
    return int("stale" in outcomes)


def copy_tree(to: Path) -> None:
    """Copies tracked files, those that git does not ignore, and compiled kernels."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    kernels = [str(path.relative_to(ROOT)) for path in ROOT.glob("hplm/*/_kernel*.so")]
    for name in [*filter(None, names), *kernels]:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    if (ROOT / ".venv").exists():
        (to / ".venv").symlink_to(ROOT / ".venv")


def bite(fault: Fault, copy: Path, until: float, kinds: list[tuple[str, str]]) -> tuple[str, ...]:
    """Puts a fault in, runs its tests, and takes it out. Returns the outcome, and what there is to say of it.

    What fails without the fault too does not count.
    """
    if said := fault.stale(copy):
        return "stale", said
    left_out: list[str] = []
    try:
        for kind in kinds:
            while True:
                before = fault.put_into(copy)
                try:
                    failed = first_failure(copy, [*kind, *fault.tests(copy), *left_out], until)
                finally:
                    for file, text in before.items():
                        file.write_text(text, "utf-8")
                if failed is None:
                    break
                if first_failure(copy, [failed[0]], until) is None:
                    return "found", *failed
                left_out.append(f"--deselect={failed[0]}")
    except subprocess.TimeoutExpired:
        return ("limit",)
    return ("missed",)


def first_failure(copy: Path, tests: list[str], until: float) -> tuple[str, str] | None:
    """Returns the first test that fails, and the first line of its message."""
    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    path = os.pathsep.join(filter(None, [str(copy), str(copy / "clients"), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "2", "COLUMNS": "1000"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, "--hypothesis-profile=found"], cwd=copy, env={**os.environ, **own}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(max(1.0, until - time.monotonic()))
        finally:  # ends what it has started too
            for number in (signal.SIGINT, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(20)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if found := ENDED.search(text):
        return found[1], found[2] or ""
    # 5: no test was chosen
    return ("pytest itself", (text.strip().splitlines() or [""])[-1]) if code not in (0, 5) else None


if __name__ == "__main__":
    sys.exit(main())
