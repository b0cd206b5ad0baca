"""`hplm place search`, `simulate` and `compare`: find a placement, and say what placements attain."""

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

BASELINES = "replication,clockwork,round-robin,greedy"
SCALES = "1,2,3,5,10"


def register(actions: argparse._SubParsersAction) -> None:
    _register_search(actions)
    _register_simulate(actions)
    _register_compare(actions)


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
    command.add_argument("--baseline", metavar="NAME", help=f"place as a baseline does, such as {BASELINES} or manual:8,2")
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


def _register_compare(actions: argparse._SubParsersAction) -> None:
    command = actions.add_parser(
        "compare",
        help="compare a search, placements and baselines at several deadlines",
        description="Screen a search's placement, given placements and baselines, at several multiples of each request's time "
        "on one device. Search and baselines place anew for each.",
    )
    command.add_argument("placements", type=Path, nargs="*", metavar="FILE", help="placements to compare as they are")
    problem_options(command, slo_scale=False)
    search_options(command)
    command.add_argument("--slo-scales", default=SCALES, metavar="X,...", help="deadlines to compare at (default: %(default)s)")
    command.add_argument(
        "--baselines", default=BASELINES, metavar="NAME,...", help="baselines to compare with (default: %(default)s)"
    )
    command.add_argument("--picture", type=Path, metavar="FILE", help="draw the shares into a .png, .svg or .pdf file")
    command.set_defaults(run=run_compare)


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
    from hplm.placement.baselines import baseline
    from hplm.placement.placement import KIND, Placement
    from hplm.placement.search import NothingFound, nothing_found
    from hplm.placement.selection import selector

    _check_picture(args)
    check_target(args.to, KIND)
    check_seconds("--confirm-seconds", args.confirm_seconds)
    serving = serving_of(args)
    problem = problem_of(args, args.slo_scale)
    select = selector(args.search)
    if (args.baseline or "").partition(":")[0] == "clockwork":
        raise InvalidInput("--baseline clockwork places anew for each window, so it has no placement: use `hplm place compare`")
    found = [baseline(args.baseline, problem, select)] if args.baseline else searched(problem, args)
    if not found[0].groups:
        raise NothingFound(nothing_found(problem, found[0].screened))
    if args.baseline and args.most_stages is not None and any(own.stages > args.most_stages for own in found[0].groups):
        raise InvalidInput(f"--baseline {args.baseline} has groups of more than --most-stages {args.most_stages}: change one")
    best, confirmed = confirmed_best(found, problem, serving, args)
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
    problem = problem_of(args, args.slo_scale)
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


def run_compare(args: argparse.Namespace) -> dict[str, Any]:
    from hplm.placement.baselines import baseline
    from hplm.placement.left_out import NOTHING
    from hplm.placement.selection import selector

    _check_picture(args)
    left_out = NOTHING
    names = [name for name in _list(args.baselines) if name]
    shares: dict[str, dict[str, float]] = {"search": {}, **{str(path): {} for path in args.placements}}
    for scale in _scales(args.slo_scales):
        problem, key = problem_of(args, scale), f"{scale:g}"
        left_out = problem.trace.left_out
        shares["search"][key] = _best_share(problem, args)
        for path in args.placements:
            shares[str(path)][key] = problem.screen.attained(placement_of(path, problem).groups).share
        for name in names:
            found = baseline(name, problem, selector(args.search))
            shares.setdefault(name, {})[key] = found.attained.share
    if args.picture is not None:
        from builder.placement_pictures import draw_shares

        draw_shares(shares, "deadline / time on one device", args.picture)
    if not args.json:
        print_left_out(left_out)
        print(_shares_text(shares))
    return {"left_out": left_out.figures, "by_slo_scale": shares}


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


def _best_share(problem: Problem, args: argparse.Namespace) -> float:
    """Returns 0 where no placement is in time, as at deadlines that are too short for any."""
    from hplm.placement.search import NothingFound

    try:
        return searched(problem, args)[0].attained.share
    except NothingFound:
        return 0.0


def _check_picture(args: argparse.Namespace) -> None:
    if args.picture is not None:
        from builder.pictures import check_picture

        check_picture(args.picture)


def say(args: argparse.Namespace) -> Any:
    return (lambda _: None) if args.json else (lambda line: print(line, file=sys.stderr))


def _list(given: str) -> list[str]:
    """Splits at commas, but not those between the numbers of a baseline's options."""
    parts: list[str] = []
    for part in given.split(","):
        if parts and part.replace(".", "").isdecimal():
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _scales(given: str) -> list[float]:
    try:
        return [float(part) for part in given.split(",")]
    except ValueError:
        raise InvalidInput(f"--slo-scales {given!r}: give numbers, such as {SCALES}") from None


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


def _shares_text(shares: dict[str, dict[str, float]]) -> str:
    scales = list(next(iter(shares.values())))
    lines = [f"{'deadline / time on one device':<32}" + "".join(f"{scale:>9}" for scale in scales)]
    lines += [f"{name:<32}" + "".join(f"{by_scale[scale]:>9.2%}" for scale in scales) for name, by_scale in shares.items()]
    return "\n".join(lines)
