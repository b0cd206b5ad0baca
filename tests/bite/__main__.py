"""`python -m tests.bite`: puts faults into a scratch copy of the tree, one at a time, and says which of them tests find."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
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
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write them to a file, after each fault")
    args = parser.parse_args()
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
    print(json.dumps(_shares(outcomes), indent=1) if args.json else _table(outcomes))
    return int(any(one.outcome == "stale" for one in outcomes))


def _run(faults: list[Fault], args: argparse.Namespace) -> list[Outcome]:
    free: SimpleQueue[Scratch] = SimpleQueue()
    copies = [Scratch(ROOT) for _ in range(min(args.jobs, len(faults)))]
    outcomes: dict[str, Outcome] = {}
    try:
        for copy in copies:
            free.put(copy)

        def bite(fault: Fault) -> None:
            copy = free.get()
            try:
                one = outcomes[fault.name] = copy.bite(fault, args.limit, not args.quick)
            finally:
                free.put(copy)
            print(_shown(one), file=sys.stderr, flush=True)
            if args.out:
                known = [outcomes[of.name] for of in faults if of.name in outcomes]
                args.out.write_text(json.dumps(_shares(known), indent=1) + "\n", "utf-8")

        with ThreadPoolExecutor(len(copies)) as pool:
            list(pool.map(bite, faults))
    finally:
        for copy in copies:
            copy.close()
    return [outcomes[fault.name] for fault in faults]


def _shares(outcomes: list[Outcome]) -> dict[str, object]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for one in outcomes:
        groups[one.group].append(one.found)
    shares = {group: f"{sum(found)} of {len(found)}" for group, found in groups.items()}
    return {
        "found": f"{sum(one.found for one in outcomes)} of {len(outcomes)}",
        "groups": shares,
        "faults": [*map(asdict, outcomes)],
    }


def _shown(one: Outcome) -> str:
    """Returns an outcome, and below it what the test said in its first line."""
    first = f"{one.outcome:<7}{one.seconds:>6.0f} s  {one.name:<40} {one.test}".rstrip()
    return first + (f"\n{'':<17}{one.said}" if one.said else "")


def _table(outcomes: list[Outcome]) -> str:
    shares = _shares(outcomes)
    groups = (f"{group:<12} {share}" for group, share in shares["groups"].items())
    return "\n".join([*map(_shown, outcomes), "", *groups, f"found {shares['found']}"])


if __name__ == "__main__":
    sys.exit(main())
