"""`python -m tests.bite`: puts faults into a scratch copy of the tree, one at a time, and says which of them tests find."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bite.faults import FAULTS, Fault, write

ROOT = Path(__file__).resolve().parents[2]
ENDED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - (.*))?$", re.MULTILINE)
PYTHON = ".venv/bin/python"  # in the copy
QUICK, SLOW = ("-m", "not slow"), ("-m", "slow")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bite", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the faults and which are stale, and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults, or those of these groups")
    parser.add_argument("--quick", action="store_true", help="no slow tests")
    parser.add_argument("--log", type=Path, metavar="FILE", help="gets the outcomes; faults that it calls found are left out")
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
    known = args.log.read_text("utf-8").splitlines() if args.log and args.log.exists() else []
    faults = [fault for fault in faults if not any(line.startswith(f"found {fault.name}: ") for line in known)]
    outcomes = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="hplm-bite-") as folder:
        copy_tree(copy := Path(folder, "tree"))
        make_python(copy)
        with warm_pytest(copy) as warm:
            for fault in faults:
                began = time.monotonic()
                outcome, *said = bite(fault, copy, warm, began + args.limit, [QUICK] if args.quick else [QUICK, SLOW])
                outcomes[outcome] += 1
                # Below an outcome stand the test that found the fault, and what it said in its first line.
                print(f"{outcome:<7}{time.monotonic() - began:>6.0f} s  {fault.name}", *said, sep=f"\n{'':<17}", flush=True)
                if args.log:
                    with args.log.open("a", encoding="utf-8") as log:
                        print(f"{outcome} {fault.name}: {' '.join(said[:1])}", file=log)
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


def make_python(copy: Path) -> None:
    """Makes a Python environment with this one's packages, and the copy's own.

    Triton's processes ignore PYTHONPATH: they import what the environment of the first Python on PATH has.
    """
    venv.create(copy / ".venv", symlinks=True)
    (packages,) = (copy / ".venv").glob("lib/python3*/site-packages")
    own = copy, copy / "clients"
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith("__editable__") and not any((folder / path.name).exists() for folder in own):
            (packages / path.name).symlink_to(path)
    (packages / "copy.pth").write_text("\n".join(map(str, own)))


def bite(fault: Fault, copy: Path, warm: subprocess.Popen[str], until: float, kinds: list[tuple[str, str]]) -> tuple[str, ...]:
    """Puts a fault in, runs its tests, and takes it out. Returns the outcome, and what there is to say of it.

    Runs the tests that import what is edited, and then those of all its rooms. What fails without the fault too does not count.
    """
    if said := fault.stale(copy):
        return "stale", said
    left_out, first = list[str](), fault.likeliest(copy)
    parts = [first] if first else [], [[room] for room in fault.tests(copy)]
    try:
        for run in [[*kind, *tests] for part in parts for kind in kinds for tests in part]:
            while True:
                before = fault.put_into(copy)
                try:
                    failed = first_failure(warm, [*run, *left_out], until)
                finally:
                    for file, text in before.items():
                        write(file, text)
                if failed is None:
                    break
                if first_failure(warm, [failed[0]], until) is None:
                    return "found", *failed
                left_out.append(f"--deselect={failed[0]}")
    except TimeoutError:
        return ("limit",)
    return ("missed",)


@contextmanager
def warm_pytest(copy: Path) -> Iterator[subprocess.Popen[str]]:
    """Yields the process of `tests.bite.warm`."""
    own = {"PYTHONDONTWRITEBYTECODE": "", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "2", "COLUMNS": "1000"}
    process = subprocess.Popen(
        [copy / PYTHON, "-m", "tests.bite.warm"], cwd=copy, env={**os.environ, **own}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.terminate()  # ends the tests too
            process.wait()


def first_failure(warm: subprocess.Popen[str], tests: list[str], until: float) -> tuple[str, str] | None:
    """Returns the first test that fails, and the first line of its message."""
    assert warm.stdin is not None and warm.stdout is not None
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        options = ["-x", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=found"]
        print(json.dumps([max(1.0, until - time.monotonic()), output.name, *options, *tests]), file=warm.stdin, flush=True)
        code, text = warm.stdout.readline().strip(), output.read()
    if not code:
        raise ChildProcessError("tests.bite.warm has ended: see its traceback")
    if code == "None":
        raise TimeoutError
    if found := ENDED.search(text):
        return found[1], found[2] or ""
    if code not in ("0", "5"):  # 5: no test was chosen
        raise ChildProcessError(f"pytest has failed:\n{text}")
    return None


if __name__ == "__main__":
    sys.exit(main())
