"""`hplm place search` and `simulate`: find a placement, and say what it attains."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hplm.cli.options import Json, Picture, about, check_picture
from hplm.cli.place_problem import Given, check_seconds, check_target, placement_of, print_left_out
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from hplm.placement.attained import Attained
    from hplm.placement.placement import Placement
    from hplm.placement.problem import Problem
    from hplm.placement.search import Found


@Parameter(name="*", group="Search")
@dataclass(frozen=True)
class Searching:
    """The options of a search."""

    search: str = "fast"
    """fast, or beam:K, which tries all units in all groups and keeps the K best selections"""
    most_stages: int | None = None
    """most stages of a group (default: any number)"""
    sample: int = 200_000
    """requests of the trace that rank placements, before all confirm the best"""
    confirm_seconds: float = 3600.0
    """length of the trace's busiest part, for the full simulator; 0: trust the screen"""

    def best(self, problem: Problem, given: Given, quiet: bool) -> tuple[Found, Attained | None]:
        """Returns the best placement by the full simulator and its result; without --confirm-seconds the screen's best."""
        from hplm.placement.confirming import confirm
        from hplm.placement.search import search
        from hplm.placement.selection import selector

        def say(line: str) -> None:
            if not quiet:
                print(line, file=sys.stderr)

        if self.sample < 1 or (self.most_stages is not None and self.most_stages < 1):
            raise InvalidInput(f"--sample {self.sample} and --most-stages {self.most_stages}: give 1 or more")
        found = search(problem, selector(self.search), self.most_stages, self.sample, say)
        if not self.confirm_seconds:
            return found[0], None
        best = confirm(found, problem, given.servers(), self.confirm_seconds, given.seed, say)[0]
        return best.found, best.attained


FAST = Searching()


def search(
    *, given: Given, to: Path, picture: Picture = None, searching: Searching = FAST, json: Json = False
) -> dict[str, Any]:
    """Find a placement that answers most requests of a trace in time (AlpaServe's algorithms 1 and 2).

    A fast screen ranks placements by the trace; the full simulator ranks the best again, on its busiest hour.

    :param to: the placement to write
    """
    from hplm.placement.placement import KIND, Placement

    check_picture(picture)
    check_target(to, KIND)
    check_seconds("--confirm-seconds", searching.confirm_seconds)
    given.servers()  # refuses wrong ones before the trace is read
    problem = given.problem()
    best, confirmed = searching.best(problem, given, json)
    placement = Placement.of(best.groups, problem.units, problem.cluster, problem.profile)
    placement.check(problem.cluster, problem.profile)
    placement.write(to)
    if picture is not None:
        from builder.pictures import draw_placement

        draw_placement(placement, problem.cluster, best.attained, picture)
    print_left_out(problem.trace.left_out)
    print(f"{best.how}\n{_groups_text(placement)}\n{attained_text('screen', best.attained)}")
    if confirmed:
        print(attained_text("full simulator, busiest part", confirmed))
    print_unplaced(placement)
    print(f"next: hplm place simulate {shlex.quote(str(to))} {given.words()}")
    if all(group.stages == 1 for group in placement.groups):
        print(f"or:   hplm place emit --placement {shlex.quote(str(to))} --repository model_repository --to groups")
    return {
        "how": best.how,
        "screened": best.screened,
        "source": problem.trace.source,
        "left_out": problem.trace.left_out.figures,
        "groups": [
            {"name": group.name, "devices": group.devices, "stages": group.stages, "intra": group.intra, "units": group.units}
            for group in best.groups
        ],
        "unplaced": [unit.name for unit in placement.unplaced],
        "screen": figures(best.attained),
        "full": confirmed and figures(confirmed),
    }


def simulate(
    placement: Annotated[Path, about("the placement")], /, *, given: Given, full_seconds: float = 3600.0, json: Json = False
) -> dict[str, Any]:
    """Say what a placement attains: by the screen on all of a trace, by the full simulator on its busiest part.

    :param full_seconds: length of the busiest part; 0: only the screen
    """
    from hplm.placement.simulation import simulate

    check_seconds("--full-seconds", full_seconds)
    serving = given.servers()
    problem = given.problem()
    placed = placement_of(placement, problem)
    attained = {"screen": problem.screen.attained(placed.groups)}
    if full_seconds > 0:
        part = problem.trace.busiest(full_seconds)
        attained["full"] = simulate(placed.groups, problem.profile, part, serving, given.seed)
    print_left_out(problem.trace.left_out)
    for name, one in attained.items():
        print(attained_text(name, one))
        print("\n".join(f"  {share:>8.2%}  {unit}" for unit, share in one.by_unit.items()))
    found = {name: figures(one) for name, one in attained.items()}
    return {"source": problem.trace.source, "left_out": problem.trace.left_out.figures, **found}


def figures(attained: Attained) -> dict[str, Any]:
    return {
        "attained": attained.share,
        "texts": len(attained.trace),
        "mean_ms": attained.mean_ms(),
        "p99_ms": attained.p99_ms(),
        "by_unit": attained.by_unit,
    }


def attained_text(name: str, attained: Attained) -> str:
    mean, p99 = attained.mean_ms(), attained.p99_ms()
    times = f", mean {mean:,.1f} ms, p99 {p99:,.1f} ms" if mean is not None else ""
    return f"{name}: {attained.share:.2%} of {len(attained.trace):,} requests in time{times} ({attained.trace.source})"


def print_unplaced(placement: Placement) -> None:
    for unit in placement.unplaced:
        print(f"no group serves {unit.name} ({unit.tenants} tenants): give more devices or more memory")


def _groups_text(placement: Placement) -> str:
    return "\n".join(
        f"  {group.name}: {group.machine} {' '.join(group.devices)}, {group.stages} stages x {group.intra}: "
        f"{', '.join(group.units)}"
        for group in placement.groups
    )
