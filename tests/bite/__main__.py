"""`python -m tests.bite`: puts faults into a scratch copy of the tree, one at a time, and says which of them tests find."""

from __future__ import annotations

import argparse
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue

from tests.bite.faults import FAULTS, Fault
from tests.bite.scratch import Outcome, Scratch

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bite", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the faults and which are stale, and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults, or those of these groups")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="scratch copies at a time")
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
    outcomes = _run(faults, args)
    print(f"\nfound {sum(one.outcome == 'found' for one in outcomes)} of {len(outcomes)}")
    return int(any(one.outcome == "stale" for one in outcomes))


def _run(faults: list[Fault], args: argparse.Namespace) -> list[Outcome]:
    """Returns the outcomes, and prints each as soon as it is there."""
    free: SimpleQueue[Scratch] = SimpleQueue()

    def bite(fault: Fault) -> Outcome:
        copy = free.get()
        try:
            one = copy.bite(fault, args.limit, not args.quick)
        finally:
            free.put(copy)
        # Below an outcome stands what the test said in its first line.
        shown = f"{one.outcome:<7}{one.seconds:>6.0f} s  {one.name:<40} {one.test}".rstrip()
        print(shown + (f"\n{'':<17}{one.said}" if one.said else ""), flush=True)
        return one

    with ExitStack() as made, ThreadPoolExecutor(args.jobs) as pool, ExitStack() as running:
        for _ in range(min(args.jobs, len(faults))):
            copy = made.enter_context(closing(Scratch(ROOT)))
            running.callback(copy.stop)  # else the pool would wait for its tests after an interruption
            free.put(copy)
        return list(pool.map(bite, faults))


if __name__ == "__main__":
    sys.exit(main())
