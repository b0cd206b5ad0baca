"""`hplm place search` and `simulate`: find a placement, and say what it attains."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hplm.cli.options import AtLeastOne, Json, NotNegative, Picture, about, check_picture, refuse_given
from hplm.cli.place import Given, check_target, placement_of
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from hplm.placement.attained import Attained
    from hplm.placement.partition import Parallel
    from hplm.placement.placement import Placement
    from hplm.placement.problem import Problem
    from hplm.placement.search import Found

DAY_S, HOUR_S = 86_400.0, 3_600.0
LABELS = {
    "screen": "screen",
    "full": "full simulator, busiest part",
    "current": "current placement, full simulator, held-out requests",
    "found": "found placement, full simulator, held-out requests",
}
KEPT = 3  # exit status: the current placement stays. 1 is an error, 2 a wrong command line


@Parameter(name="*", group="Search")
@dataclass(frozen=True)
class Searching:
    """The options of a search."""

    search: str = "fast"
    """fast, or beam:K, which tries all units in all groups and keeps the K best selections"""
    most_stages: AtLeastOne | None = None
    """most stages of a group (default: any number)"""
    sample: AtLeastOne = 200_000
    """requests of the trace that rank placements, before all confirm the best"""
    confirm_seconds: float = 3600.0
    """length of the trace's busiest part, for the full simulator; 0: trust the screen"""

    def best(self, problem: Problem, given: Given, quiet: bool) -> tuple[Found, Attained | None]:
        """Returns the best placement by the full simulator and its result; without --confirm-seconds the screen's best."""
        from hplm.placement.search import confirm, search
        from hplm.placement.selection import selector

        def say(line: str) -> None:
            if not quiet:
                print(line, file=sys.stderr)

        found = search(problem, selector(self.search), self.allows, self.sample, say)
        if not self.confirm_seconds:
            return found[0], None
        return confirm(found, problem, given.servers(), self.confirm_seconds, say)[0]

    def allows(self, one: Parallel) -> bool:
        """Whether servers run such groups (`hplm place emit`), and the user wants them."""
        return 1 in (one.stages, one.intra) and one.stages <= (self.most_stages or one.stages)


@Parameter(name="*", group="Renew")
@dataclass(frozen=True)
class Renewing:
    """The options that compare the found placement with the current one, on requests that the search did not see."""

    current: Path | None = None
    """the current placement: --to is written only if it is clearly better"""
    search_seconds: float = DAY_S
    """length of the part of the trace that is searched with"""
    test_seconds: float = HOUR_S
    """length of the trace's end, which is held out from the search to test both placements"""
    least_gain: NotNegative = 1.0
    """how many percentage points more of these requests must be answered in time"""

    def check(self, to: Path) -> None:
        from hplm.placement.workload import span_ns

        if self.current is None:
            refuse_given("works only with --current, the placement to renew: give it, or leave this out", self)
            return
        if os.path.realpath(to) == os.path.realpath(self.current):
            raise InvalidInput(f"--to {to} is the current placement, which servers still follow: name another file")
        span_ns(self.search_seconds, "--search-seconds")
        span_ns(self.test_seconds, "--test-seconds")


FAST, ANEW = Searching(), Renewing()


def search(
    *, given: Given, to: Path, picture: Picture = None, searching: Searching = FAST, renewing: Renewing = ANEW,
    json: Json = False,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Find a placement that answers most requests of a trace in time (AlpaServe's algorithms 1 and 2).

    A fast screen ranks placements by the trace; the full simulator ranks the best again, on its busiest hour.

    With --current the search gets all requests of the trace's last day but those of its last hour, by which the simulator
    compares both placements. Exit status: 0 if the found one was written, 3 if the current one stays. Then an older --to is
    removed.

    :param to: the placement to write
    """
    from hplm.placement.attained import gain_points, is_worth
    from hplm.placement.placement import KIND, Placement
    from hplm.placement.simulation import simulate
    from hplm.placement.workload import span_ns

    check_picture(picture)
    check_target(to, KIND)
    if searching.confirm_seconds:
        span_ns(searching.confirm_seconds, "--confirm-seconds")  # before the search
    renewing.check(to)
    serving = given.servers()  # refuses wrong ones before the trace is read
    if renewing.current is None:
        problem, current, held_out = given.problem(), None, None
        searched = problem.trace
    else:
        problem = given.problem(renewing.search_seconds + renewing.test_seconds)
        current = placement_of(renewing.current, problem)
        searched, held_out = problem.trace.divided(renewing.search_seconds, renewing.test_seconds)
        held_out.expect_known()  # they decide
    best, confirmed = searching.best(problem.on(searched), given, json)
    found = Placement.of(best.groups, problem.units, problem.cluster, problem.profile)
    found.check(problem.cluster, problem.profile)
    attained, gain = {"screen": best.attained, "full": confirmed}, None
    if current is not None and held_out is not None:
        both = [simulate(one.groups, problem.profile, held_out, serving) for one in (current, found)]
        attained |= zip(("current", "found"), both, strict=True)
        gain = gain_points(*both)
    is_written = gain is None or is_worth(gain, renewing.least_gain)
    if is_written:
        found.write(to)
        outcome = f"{to} is written"
    else:
        outcome = f"{renewing.current} stays" + (f", and {to} of an earlier run is removed" if to.exists() else "")
        to.unlink(missing_ok=True)  # somebody might apply it
    if picture is not None:
        from builder.pictures import draw_placement

        draw_placement(found, problem.cluster, best.attained, picture)
    if problem.trace.left_out:
        print(problem.trace.left_out.note)
    print(best.how)
    for group in found.groups:
        cut = f"{group.stages} stages x {group.intra}"
        print(f"  {group.name}: {group.machine} {' '.join(group.devices)}, {cut}: {', '.join(group.units)}")
    for name, one in attained.items():
        if one is not None:
            print(_attained_text(LABELS[name], one))
    if gain is not None:
        print(f"{gain:+.2f} points, and {renewing.least_gain:g} are wanted: {outcome}")
    if is_written:
        _print_next(found, to, given, "groups" if gain is None else "groups-next")
    return {
        "written": is_written,
        "gain_points": gain,
        "how": best.how,
        "screened": best.screened,
        "source": problem.trace.source,
        "left_out": problem.trace.left_out.figures,
        "groups": [
            {"name": group.name, "devices": group.devices, "stages": group.stages, "intra": group.intra, "units": group.units}
            for group in best.groups
        ],
        "unplaced": [unit.name for unit in found.unplaced],
        **{name: one and _figures(one) for name, one in attained.items()},
    }, 0 if is_written else KEPT


def simulate(
    placement: Annotated[Path, about("the placement")], /, *, given: Given, full_seconds: float = 3600.0, json: Json = False
) -> dict[str, Any]:
    """Say what a placement attains: by the screen on all of a trace, by the full simulator on its busiest part.

    :param full_seconds: length of the busiest part; 0: only the screen
    """
    from hplm.placement.simulation import simulate

    serving = given.servers()
    problem = given.problem()
    placed = placement_of(placement, problem)
    attained = {"screen": problem.screen.attained(placed.groups)}
    if full_seconds:
        part = problem.trace.busiest(full_seconds)
        attained["full"] = simulate(placed.groups, problem.profile, part, serving)
    if problem.trace.left_out:
        print(problem.trace.left_out.note)
    for name, one in attained.items():
        print(_attained_text(LABELS[name], one))
        print("\n".join(f"  {share:>8.2%}  {unit}" for unit, share in one.by_unit.items()))
    found = {name: _figures(one) for name, one in attained.items()}
    return {"source": problem.trace.source, "left_out": problem.trace.left_out.figures, **found}


def _figures(attained: Attained) -> dict[str, Any]:
    return {
        "attained": attained.share,
        "texts": len(attained.trace),
        "seconds": attained.trace.seconds,
        "mean_ms": attained.mean_ms(),
        "p99_ms": attained.p99_ms(),
        "by_unit": attained.by_unit,
    }


def _attained_text(name: str, attained: Attained) -> str:
    mean, p99 = attained.mean_ms(), attained.p99_ms()
    times = f", mean {mean:,.1f} ms, p99 {p99:,.1f} ms" if mean is not None else ""
    return f"{name}: {attained.share:.2%} of {len(attained.trace):,} requests in time{times} ({attained.trace.source})"


def _print_next(placement: Placement, file: Path, given: Given, folder: str) -> None:
    """Prints what a placement leaves out, and what to do with its file. `folder`: for the repositories of its groups."""
    for unit in placement.unplaced:
        print(f"no group serves {unit.name} ({unit.tenants} tenants): give more devices or more memory")
    print(f"next: hplm place simulate {shlex.quote(str(file))} {given.words()}")
    print(f"or:   hplm place emit --placement {shlex.quote(str(file))} --repository model_repository --to {folder}")
