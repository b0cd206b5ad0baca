"""`hplm place search` and `simulate`: find a placement, and say what it attains."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hplm.cli.options import AtLeastOne, Picture, about, named_values
from hplm.cli.place import ProblemOptions, check_target
from hplm.errors import InvalidInput
from hplm.registered import of_stores

if TYPE_CHECKING:
    from hplm.placement.attained import Attained
    from hplm.placement.partition import Parallel


@Parameter(name="*", group="Search")
@dataclass(frozen=True)
class Searching:
    """The options of a search."""

    search: str = "fast"
    """fast, or beam:K, which tries all units in all groups and keeps the K best selections"""
    batch_texts: AtLeastOne = 1
    """most texts of a batch"""


FAST = Searching()


def is_served(one: Parallel) -> bool:
    """Whether servers run such groups (`hplm place emit`)."""
    return 1 in (one.stages, one.intra)


def search(*, given: ProblemOptions, to: Path, picture: Picture = None, searching: Searching = FAST) -> dict[str, Any]:
    """Find a placement that answers most requests of a trace in time (AlpaServe's algorithms 1 and 2).

    A fast screen ranks placements. `hplm place simulate` says what the placement attains with the code that serves.

    :param to: the placement to write
    """
    from hplm.placement.placement import KIND, Placement
    from hplm.placement.search import search
    from hplm.placement.selection import selector

    if picture is not None:
        of_stores("check_picture")(picture)
    check_target(to, KIND)
    select = selector(searching.search)  # refuses a wrong one before the trace is read
    problem = given.problem(searching.batch_texts)
    best = search(problem, select, is_served, say=partial(print, file=sys.stderr))[0]
    found = Placement.of(best.groups, problem.units, problem.cluster, problem.profile)
    found.check(problem.cluster, problem.profile)
    found.write(to)
    if picture is not None:
        of_stores("draw_placement")(found, problem.cluster, best.attained, picture)
    if problem.trace.left_out:
        print(problem.trace.left_out.note)
    print(best.how)
    for group in found.groups:
        cut = f"{group.stages} stages x {group.intra}"
        print(f"  {group.name}: {group.machine} {' '.join(group.devices)}, {cut}: {', '.join(group.units)}")
    print(f"screen: {_attained_text(best.attained)}")
    for unit in found.unplaced:
        print(f"no group serves {unit.name} ({unit.tenants} tenants): give more devices or more memory")
    print(f"next: hplm place simulate {shlex.quote(str(to))} {given.words()}")
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
        "unplaced": [unit.name for unit in found.unplaced],
        "screen": _figures(best.attained),
    }


def simulate(
    placement: Annotated[Path, about("the placement")], /, *, given: ProblemOptions, seconds: float = 3600.0,
    parameters: tuple[str, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """Say what a placement attains: the code that serves answers the busiest part of a trace on a virtual clock.

    :param seconds: length of the busiest part
    :param parameters: NAME=VALUE: those of the servers, as for `hplm export`, and batch_texts (default: as exported)
    """
    from hplm.placement.placement import Placement
    from hplm.placement.simulation import ServerSettings, simulate
    from hplm.placement.workload import span_ns

    servers = ServerSettings.of(named_values(parameters))
    span_ns(seconds, "--seconds")  # before the trace is read
    problem, placed = given.problem(), Placement.read(placement)
    placed.check(problem.cluster, problem.profile)
    if set(placed.units) != set(problem.units):
        way_out = f"give --hot {' '.join(placed.hot)}" if placed.hot else "leave out --hot"
        raise InvalidInput(f"{placement} has other hot tenants: {way_out}, as in the search that made it")
    part = problem.trace.busiest(seconds)
    part.expect_deadlines()
    attained = simulate(placed.groups, problem.profile, part, servers)
    if problem.trace.left_out:
        print(problem.trace.left_out.note)
    print(_attained_text(attained))
    print("\n".join(f"  {share:>8.2%}  {unit}" for unit, share in attained.by_unit.items()))
    return {"source": part.source, "left_out": problem.trace.left_out.figures, **_figures(attained)}


def _figures(attained: Attained) -> dict[str, Any]:
    return {
        "attained": attained.share,
        "texts": len(attained.trace),
        "seconds": attained.trace.seconds,
        "mean_ms": attained.mean_ms(),
        "p99_ms": attained.p99_ms(),
        "by_unit": attained.by_unit,
    }


def _attained_text(attained: Attained) -> str:
    mean, p99 = attained.mean_ms(), attained.p99_ms()
    times = f", mean {mean:,.1f} ms, p99 {p99:,.1f} ms" if mean is not None else ""
    return f"{attained.share:.2%} of {len(attained.trace):,} requests in time{times} ({attained.trace.source})"
