"""The options of `hplm place` that say what is to be placed: the cluster, the profiles and the trace."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from hplm.placement.left_out import LeftOut
    from hplm.placement.placement import Placement
    from hplm.placement.problem import Problem
    from hplm.placement.servers import Serving

PROBLEM: dict[str, Any] = {  # options of a problem, and their defaults
    "cluster": None, "profiles": None, "trace": None, "slo_scale": None, "hot": None, "rate": 1.0, "batch_texts": 1,
    "serving": None, "seed": 0,
}  # fmt: skip
MOST = 10_000_000  # of factors and seconds


def problem_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--cluster", type=Path, required=True, metavar="FILE", help="machines, devices and their memory")
    command.add_argument(
        "--profiles", type=Path, nargs="+", required=True, metavar="FILE", help="what `hplm place profile` has measured"
    )
    command.add_argument(
        "--trace", type=Path, nargs="+", required=True, metavar="FILE",
        help="journals of servers, or one recorded trace",
    )  # fmt: skip
    command.add_argument(
        "--slo-scale", type=float, metavar="X",
        help="deadlines: so many times a request's time on one device (default: the deadlines of the trace)",
    )  # fmt: skip
    command.add_argument(
        "--hot", nargs="+", default=[], metavar="BACKBONE/TENANT", help="tenants that are placed apart from their domain"
    )
    command.add_argument(
        "--rate", type=float, default=1.0, metavar="X", help="multiple of the trace's rate of requests (default: %(default)g)"
    )
    command.add_argument(
        "--batch-texts", type=int, default=1, metavar="N", help="most texts of a batch of the screen (default: %(default)s)"
    )
    command.add_argument("--seed", type=int, default=0, help="of all random choices (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")


def serving_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--serving", nargs="+", default=[], metavar="NAME=VALUE",
        help="parameters of the servers for the full simulator, as in config.pbtxt, and batch_texts (default: as exported)",
    )  # fmt: skip


def problem_of(args: argparse.Namespace, last_s: float | None = None) -> Problem:
    """`last_s`: only so many seconds at the end of the trace will be used, so only there too many requests may be unknown."""
    from hplm.placement.cluster import Cluster
    from hplm.placement.problem import Problem
    from hplm.placement.profile import Profile
    from hplm.placement.screen import alone_ns
    from hplm.placement.traces import read_trace, units_by_name
    from hplm.placement.units import units_of

    for option, given in (("rate", args.rate), ("slo-scale", args.slo_scale)):
        if given is not None and not 0 < given <= MOST:
            raise InvalidInput(f"--{option} {given:g}: give a number above 0, at most {MOST:,}")
    if args.seed < 0:
        raise InvalidInput(f"--seed {args.seed}: give 0 or more")
    cluster, profile = Cluster.read(args.cluster), Profile.together([Profile.read(path) for path in args.profiles])
    units = units_of(profile, args.hot)
    trace = read_trace(args.trace, units_by_name(profile, units)).expect_known(last_s).at_rate(args.rate)
    if args.slo_scale is not None:
        trace = trace.with_timeouts(args.slo_scale * alone_ns(profile, trace))
    trace.expect_deadlines()
    return Problem(cluster, profile, units, trace, args.batch_texts)


def print_left_out(left_out: LeftOut) -> None:
    if left_out:
        print(f"note: {left_out.text}")


def given_options(args: argparse.Namespace) -> str:
    """Returns the options that describe the same problem again."""
    given: list[str] = []
    for name, value in vars(args).items():
        if name in PROBLEM and value not in (PROBLEM[name], None, []):
            values = value if isinstance(value, list) else [value]
            given += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(given)


def placement_of(path: Path, problem: Problem) -> Placement:
    """Reads a placement, which must have the problem's units."""
    from hplm.placement.placement import Placement

    placement = Placement.read(path)
    placement.check(problem.cluster, problem.profile)
    if set(placement.units) != set(problem.units):
        way_out = f"give --hot {' '.join(placement.hot)}" if placement.hot else "leave out --hot"
        raise InvalidInput(f"{path} has other hot tenants: {way_out}, as in the search that made it")
    return placement


def serving_of(args: argparse.Namespace) -> Serving:
    from hplm.placement.servers import Serving

    return Serving.of(dict(part.partition("=")[::2] for part in args.serving))


def check_seconds(option: str, seconds: float) -> None:
    if not 0 <= seconds <= MOST:
        raise InvalidInput(f"{option} {seconds:g}: give seconds from 0 to {MOST:,}")


def check_target(path: Path, kind: str) -> None:
    """Refuses a file whose folder does not exist, or that is of another kind, before anything is computed for it."""
    from hplm.placement.files import kind_of

    if not path.parent.is_dir():
        raise InvalidInput(f"--to {path}: the folder {path.parent} does not exist: make it, or name another file")
    if path.exists() and kind_of(path) != kind:
        raise InvalidInput(f"--to {path} exists, and is no {kind.removeprefix('hplm ')}: name another file")
