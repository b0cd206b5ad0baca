"""Confirms the best placements of a search: the full simulator ranks them again, on the busiest part of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hplm.placement.attained import Attained
from hplm.placement.problem import Problem
from hplm.placement.search import Found, Say
from hplm.placement.servers import Serving
from hplm.placement.simulation import simulate

BUSIEST_S = 3600.0
NEAR = 0.01  # of the best share on the whole trace: placements that attain less are not confirmed


@dataclass(frozen=True, eq=False)
class Confirmed:
    found: Found
    attained: Attained  # by the full simulator, on the busiest part


def confirm(
    found: Sequence[Found],
    problem: Problem,
    serving: Serving,
    seconds: float = BUSIEST_S,
    seed: int = 0,
    say: Say = lambda _: None,
) -> list[Confirmed]:
    """Returns the placements, the best first by the full simulator. All are simulated with the same requests.

    The busiest part may have requests of few units, so placements that attain less on the whole trace are left out.
    """
    part = problem.trace.busiest(seconds)
    best = max(one.attained.share for one in found)
    confirmed: list[Confirmed] = []
    for one in (own for own in found if own.attained.share >= best - NEAR):
        confirmed.append(Confirmed(one, simulate(one.groups, problem.profile, part, serving, seed)))
        say(f"{one.how}: {confirmed[-1].attained.share:.2%} of {len(part):,} in the full simulator")
    return sorted(confirmed, key=lambda one: -one.attained.share)  # stable: of equal ones the screen's best
