"""The options of `hplm place` that say what is to be placed: the cluster, the profiles and the trace."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from hplm.cli.options import AtLeastOne, Positive
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from hplm.placement.placement import Placement
    from hplm.placement.problem import Problem
    from hplm.placement.simulation import Serving


@Parameter(name="*")
@dataclass(frozen=True)
class Given:
    """The options of a problem."""

    cluster: Path
    """machines, devices and their memory"""
    profiles: tuple[Path, ...]
    """what `hplm place profile` has measured"""
    trace: tuple[Path, ...]
    """journals of servers, or one recorded trace"""
    slo_scale: Positive | None = None
    """deadlines: so many times a request's time on one device (default: the deadlines of the trace)"""
    hot: tuple[str, ...] = ()
    """tenants that are placed apart from their domain, as BACKBONE/TENANT"""
    rate: Positive = 1.0
    """multiple of the trace's rate of requests"""
    batch_texts: AtLeastOne = 1
    """most texts of a batch of the screen; above 1 it takes a hundred times as long"""
    serving: tuple[str, ...] = ()
    """NAME=VALUE: parameters of the servers for the full simulator, as in config.pbtxt, and batch_texts (default: as
    exported)"""

    def problem(self, last_s: float | None = None) -> Problem:
        """`last_s`: only with so many seconds at the end of the trace."""
        from hplm.placement.cluster import Cluster
        from hplm.placement.problem import Problem
        from hplm.placement.profile import Profile
        from hplm.placement.screen import alone_ns
        from hplm.placement.traces import read_trace
        from hplm.placement.units import units_by_name, units_of

        cluster, profile = Cluster.read(self.cluster), Profile.together([Profile.read(path) for path in self.profiles])
        units = units_of(profile, self.hot)
        trace = read_trace(self.trace, units_by_name(profile, units)).at_rate(self.rate)
        trace = trace if last_s is None else trace.last(last_s)
        trace.expect_known()
        if self.slo_scale is not None:
            trace = trace.with_timeouts(self.slo_scale * alone_ns(profile, trace))
        return Problem(cluster, profile, units, trace, self.batch_texts)

    def servers(self) -> Serving:
        from hplm.placement.simulation import Serving

        return Serving.of({name: value for name, _, value in (part.partition("=") for part in self.serving)})

    def words(self) -> str:
        """Returns the options that describe the same problem again."""
        words: list[str] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                words += [f"--{one.name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
        return shlex.join(words)


def placement_of(path: Path, problem: Problem) -> Placement:
    """Reads a placement, which must have the problem's units."""
    from hplm.placement.placement import Placement

    placement = Placement.read(path)
    placement.check(problem.cluster, problem.profile)
    if set(placement.units) != set(problem.units):
        way_out = f"give --hot {' '.join(placement.hot)}" if placement.hot else "leave out --hot"
        raise InvalidInput(f"{path} has other hot tenants: {way_out}, as in the search that made it")
    return placement


def check_target(path: Path, kind: str) -> None:
    """Refuses a file whose folder does not exist, or that is of another kind, before anything is computed for it."""
    from hplm.placement.files import kind_of

    if not path.parent.is_dir():
        raise InvalidInput(f"--to {path}: the folder {path.parent} does not exist: make it, or name another file")
    if path.exists() and kind_of(path) != kind:
        raise InvalidInput(f"--to {path} exists, and is no {kind.removeprefix('hplm ')}: name another file")
