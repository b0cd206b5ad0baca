"""`hplm place renew`: searches anew with the last requests, and writes what is clearly better than the current placement."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from pathlib import Path
from typing import Any

from hplm.cli.place_problem import (
    check_seconds,
    check_target,
    placement_of,
    print_left_out,
    problem_of,
    problem_options,
    serving_of,
    serving_option,
)
from hplm.cli.place_search import (
    attained_text,
    confirm_option,
    confirmed_best,
    figures,
    print_unplaced,
    search_options,
    searched,
)
from hplm.errors import InvalidInput

DAY_S, HOUR_S = 86_400.0, 3_600.0
KEPT = 3  # exit status: the current placement stays. 1 is an error, 2 a wrong command line


def register(actions: argparse._SubParsersAction) -> None:
    command = actions.add_parser(
        "renew",
        help="search anew with the last requests, and write a placement that is clearly better than the current one",
        description="Search with all requests of the trace's last day but those of its last hour. Simulate the current "
        "placement and the found one with that hour. Write the found one if it answers more requests in time, by --least-gain "
        f"at least. Exit status: 0 if it was written, {KEPT} if the current placement stays. Then an older --to is removed.",
    )
    command.add_argument("placement", type=Path, metavar="FILE", help="the current placement")
    problem_options(command)
    serving_option(command)
    search_options(command)
    confirm_option(command)
    command.add_argument(
        "--search-seconds", type=float, default=DAY_S, metavar="SECONDS",
        help="length of the part of the trace that is searched with (default: %(default)g)",
    )  # fmt: skip
    command.add_argument(
        "--test-seconds", type=float, default=HOUR_S, metavar="SECONDS",
        help="length of the trace's end, which is held out from the search to test both placements (default: %(default)g)",
    )  # fmt: skip
    command.add_argument(
        "--least-gain", type=float, default=1.0, metavar="POINTS",
        help="how many percentage points more of these requests must be answered in time (default: %(default)g)",
    )  # fmt: skip
    command.add_argument("--to", type=Path, required=True, metavar="FILE", help="the new placement to write")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from hplm.placement.placement import Placement
    from hplm.placement.renewal import Comparison, divided
    from hplm.placement.simulation import simulate

    _check(args)
    serving = serving_of(args)
    problem = problem_of(args, args.search_seconds + args.test_seconds)
    current = placement_of(args.placement, problem)
    problem.trace.expect_known(args.test_seconds)  # these decide
    before, held_out = divided(problem.trace, args.search_seconds, args.test_seconds)
    past = problem.on(before)
    best, _ = confirmed_best(searched(past, args), past, serving, args)
    found = Placement.of(best.groups, problem.units, problem.cluster, problem.profile)
    found.check(problem.cluster, problem.profile)
    compared = Comparison(*(simulate(one.groups, problem.profile, held_out, serving, args.seed) for one in (current, found)))
    is_written = compared.is_worth(args.least_gain)
    is_removed = False
    if is_written:
        found.write(args.to)
    else:
        args.status, is_removed = KEPT, _removed(args.to)
    if not args.json:
        print_left_out(problem.trace.left_out)
        print(f"searched with {len(before):,} requests of {before.seconds:,.0f} s: {best.how}")
        print(attained_text("current placement, full simulator, held-out requests", compared.current))
        print(attained_text("found placement, full simulator, held-out requests", compared.found))
        _print_verdict(args, compared.gain_points, is_removed)
        if is_written:
            print_unplaced(found)
            print(
                f"next: hplm place emit --placement {shlex.quote(str(args.to))} --repository model_repository --to groups-new"
            )
    return {
        "written": is_written,
        "removed": is_removed,
        "gain_points": compared.gain_points,
        "how": best.how,
        "source": problem.trace.source,
        "left_out": problem.trace.left_out.figures,
        "searched": {"seconds": before.seconds, "texts": len(before)},
        "tested": {"seconds": held_out.seconds, "texts": len(held_out)},
        "current": figures(compared.current),
        "found": figures(compared.found),
        "unplaced": [unit.name for unit in found.unplaced],
    }


def _check(args: argparse.Namespace) -> None:
    """Refuses wrong options before anything is read."""
    from hplm.placement.placement import KIND

    check_target(args.to, KIND)
    if os.path.realpath(args.to) == os.path.realpath(args.placement):
        raise InvalidInput(f"--to {args.to} is the current placement, which servers still follow: name another file")
    for option in ("confirm", "search", "test"):
        check_seconds(f"--{option}-seconds", getattr(args, f"{option}_seconds"))
    if not 0 <= args.least_gain < math.inf:
        raise InvalidInput(f"--least-gain {args.least_gain:g}: give 0 percentage points or more")


def _removed(older: Path) -> bool:
    """Removes what an earlier run has found, because somebody might apply it. Returns whether there was such a file."""
    if not older.is_file():
        return False
    older.unlink()
    return True


def _print_verdict(args: argparse.Namespace, gain_points: float, is_removed: bool) -> None:
    said = f"{gain_points:+.2f} points, and {args.least_gain:g} are wanted"
    kept = f"{args.placement} stays" + (f", and {args.to} of an earlier run is removed" if is_removed else "")
    print(f"{said}: {kept}" if getattr(args, "status", 0) == KEPT else f"{said}: {args.to} is written")
