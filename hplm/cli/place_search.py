"""`hplm place search` and `simulate`: find a placement, and say what it attains."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.cli.place_problem import (
    check_seconds,
    check_target,
    given_options,
    placement_of,
    print_left_out,
    problem_of,
    problem_options,
    serving_of,
    serving_option,
)
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from hplm.placement.attained import Attained
    from hplm.placement.placement import Placement
    from hplm.placement.problem import Problem
    from hplm.placement.search import Found
    from hplm.placement.servers import Serving


def register(actions: argparse._SubParsersAction) -> None:
    _register_search(actions)
    _register_simulate(actions)


def _register_search(actions: argparse._SubParsersAction) -> None:
    command = actions.add_parser(
        "search",
        help="find a placement that answers most requests of a trace in time",
        description="Search for groups of devices, their cuts and their units (AlpaServe's algorithms 1 and 2). A fast screen "
        "ranks placements by the trace; the full simulator ranks the best again, on its busiest hour.",
    )
    problem_options(command)
    serving_option(command)
    search_options(command)
    confirm_option(command)
    command.add_argument("--to", type=Path, required=True, metavar="FILE", help="the placement to write")
    command.add_argument("--picture", type=Path, metavar="FILE", help="draw the placement into a .png, .svg or .pdf file")
    command.set_defaults(run=run_search)


def _register_simulate(actions: argparse._SubParsersAction) -> None:
    command = actions.add_parser(
        "simulate",
        help="say what a placement attains with a trace",
        description="Simulate a placement: with the screen on all of the trace, with the full simulator on its busiest part.",
    )
    command.add_argument("placement", type=Path, metavar="FILE", help="the placement")
    problem_options(command)
    serving_option(command)
    command.add_argument(
        "--full-seconds", type=float, default=3600.0, metavar="SECONDS",
        help="length of the busiest part; 0: only the screen (default: %(default)g)",
    )  # fmt: skip
    command.set_defaults(run=run_simulate)


def search_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--search", default="fast", metavar="HOW",
        help="fast, or beam:K, which tries all units in all groups and keeps the K best selections (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--most-stages", type=int, metavar="N", help="most stages of a group (default: any number)")
    command.add_argument(
        "--sample", type=int, default=200_000, metavar="N",
        help="requests of the trace that rank placements, before all confirm the best (default: %(default)s)",
    )  # fmt: skip


def confirm_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--confirm-seconds", type=float, default=3600.0, metavar="SECONDS",
        help="length of the trace's busiest part, for the full simulator; 0: trust the screen (default: %(default)g)",
    )  # fmt: skip


def run_search(args: argparse.Namespace) -> dict[str, Any]:
    from hplm.placement.placement import KIND, Placement

    if args.picture is not None:
        from builder.pictures import check_picture

        check_picture(args.picture)
    check_target(args.to, KIND)
    check_seconds("--confirm-seconds", args.confirm_seconds)
    serving = serving_of(args)
    problem = problem_of(args)
    best, confirmed = confirmed_best(searched(problem, args), problem, serving, args)
    placement = Placement.of(best.groups, problem.units, problem.cluster, problem.profile)
    placement.check(problem.cluster, problem.profile)
    placement.write(args.to)
    if args.picture is not None:
        from builder.placement_pictures import draw_placement

        draw_placement(placement, problem.cluster, best.attained, args.picture)
    if not args.json:
        print_left_out(problem.trace.left_out)
        print(f"{best.how}\n{_groups_text(placement)}\n{attained_text('screen', best.attained)}")
        if confirmed:
            print(attained_text("full simulator, busiest part", confirmed))
        print_unplaced(placement)
        print(f"next: hplm place simulate {shlex.quote(str(args.to))} {given_options(args)}")
        if all(group.stages == 1 for group in placement.groups):
            print(f"or:   hplm place emit --placement {shlex.quote(str(args.to))} --repository model_repository --to groups")
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


def run_simulate(args: argparse.Namespace) -> dict[str, Any]:
    from hplm.placement.simulation import simulate

    check_seconds("--full-seconds", args.full_seconds)
    serving = serving_of(args)
    problem = problem_of(args)
    placement = placement_of(args.placement, problem)
    attained = {"screen": problem.screen.attained(placement.groups)}
    if args.full_seconds > 0:
        part = problem.trace.busiest(args.full_seconds)
        attained["full"] = simulate(placement.groups, problem.profile, part, serving, args.seed)
    if not args.json:
        print_left_out(problem.trace.left_out)
        for name, one in attained.items():
            print(attained_text(name, one))
            print("\n".join(f"  {share:>8.2%}  {unit}" for unit, share in one.by_unit.items()))
    trace = problem.trace
    found = {name: figures(one) for name, one in attained.items()}
    return {"source": trace.source, "left_out": trace.left_out.figures, **found}


def searched(problem: Problem, args: argparse.Namespace) -> list[Found]:
    from hplm.placement.search import search
    from hplm.placement.selection import selector

    if args.sample < 1 or (args.most_stages is not None and args.most_stages < 1):
        raise InvalidInput(f"--sample {args.sample} and --most-stages {args.most_stages}: give 1 or more")
    return search(problem, selector(args.search), args.most_stages, args.sample, say(args))


def confirmed_best(
    found: list[Found], problem: Problem, serving: Serving, args: argparse.Namespace
) -> tuple[Found, Attained | None]:
    """Returns the best placement by the full simulator and its result there; without --confirm-seconds the screen's best."""
    from hplm.placement.confirming import confirm

    if not args.confirm_seconds:
        return found[0], None
    best = confirm(found, problem, serving, args.confirm_seconds, args.seed, say(args))[0]
    return best.found, best.attained


def say(args: argparse.Namespace) -> Any:
    return (lambda _: None) if args.json else (lambda line: print(line, file=sys.stderr))


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
