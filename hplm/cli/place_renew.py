"""`hplm place renew`: searches anew with the last requests, and writes what is clearly better than the current placement."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

from hplm.cli.options import Json, about
from hplm.cli.place_problem import Given, check_seconds, check_target, placement_of, print_left_out
from hplm.cli.place_search import FAST, Searching, attained_text, figures, print_unplaced
from hplm.errors import InvalidInput

DAY_S, HOUR_S = 86_400.0, 3_600.0
KEPT = 3  # exit status: the current placement stays. 1 is an error, 2 a wrong command line


def renew(
    placement: Annotated[Path, about("the current placement")], /, *, given: Given, to: Path, search_seconds: float = DAY_S,
    test_seconds: float = HOUR_S, least_gain: float = 1.0, searching: Searching = FAST, json: Json = False,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Search anew with the last requests, and write a placement that is clearly better than the current one.

    The search gets all requests of the trace's last day but those of its last hour, by which the simulator compares both. Exit
    status: 0 if the found placement was written, 3 if the current one stays. Then an older --to is removed.

    :param to: the new placement to write
    :param search_seconds: length of the part of the trace that is searched with
    :param test_seconds: length of the trace's end, which is held out from the search to test both placements
    :param least_gain: how many percentage points more of these requests must be answered in time
    """
    from hplm.placement.placement import KIND, Placement
    from hplm.placement.renewal import Comparison, divided
    from hplm.placement.simulation import simulate

    check_target(to, KIND)
    if os.path.realpath(to) == os.path.realpath(placement):
        raise InvalidInput(f"--to {to} is the current placement, which servers still follow: name another file")
    for option, seconds in (("confirm", searching.confirm_seconds), ("search", search_seconds), ("test", test_seconds)):
        check_seconds(f"--{option}-seconds", seconds)
    if not 0 <= least_gain < math.inf:
        raise InvalidInput(f"--least-gain {least_gain:g}: give 0 percentage points or more")
    serving = given.servers()
    problem = given.problem(search_seconds + test_seconds)
    current = placement_of(placement, problem)
    before, held_out = divided(problem.trace, search_seconds, test_seconds)
    held_out.expect_known()  # these decide
    past = problem.on(before)
    best, _ = searching.best(past, given, json)
    found = Placement.of(best.groups, problem.units, problem.cluster, problem.profile)
    found.check(problem.cluster, problem.profile)
    compared = Comparison(*(simulate(one.groups, problem.profile, held_out, serving, given.seed) for one in (current, found)))
    is_written, is_removed = compared.is_worth(least_gain), False
    if is_written:
        found.write(to)
    else:
        is_removed = _removed(to)
    print_left_out(problem.trace.left_out)
    print(f"searched with {len(before):,} requests of {before.seconds:,.0f} s: {best.how}")
    print(attained_text("current placement, full simulator, held-out requests", compared.current))
    print(attained_text("found placement, full simulator, held-out requests", compared.found))
    kept = f"{placement} stays" + (f", and {to} of an earlier run is removed" if is_removed else "")
    gain = f"{compared.gain_points:+.2f} points, and {least_gain:g} are wanted"
    print(f"{gain}: {f'{to} is written' if is_written else kept}")
    if is_written:
        print_unplaced(found)
        print(f"next: hplm place emit --placement {shlex.quote(str(to))} --repository model_repository --to groups-new")
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
    }, 0 if is_written else KEPT


def _removed(older: Path) -> bool:
    """Removes what an earlier run has found, because somebody might apply it. Returns whether there was such a file."""
    if not older.is_file():
        return False
    older.unlink()
    return True
