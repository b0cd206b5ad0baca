"""The full simulator: each group's own encoder, as it serves, with simulated stages, all on one virtual clock.

The screen ranks placements; this one confirms the best. It batches, packs and drops texts as the server does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hplm.placement.attained import REFUSED, Attained
from hplm.placement.placement import Group
from hplm.placement.profile import Profile
from hplm.placement.servers import GroupServer, Serving
from hplm.placement.workload import Trace
from hplm.simulate.arrivals import Arrivals, SimulatedText
from hplm.simulate.encoders import Outcome, run


def simulate(groups: Sequence[Group], profile: Profile, trace: Trace, serving: Serving, seed: int = 0) -> Attained:
    """Returns what the groups' servers answer in time. Each unit is a tenant for them. The same seed gives the same result."""
    arrivals = Arrivals(trace.arrival_ns, trace.tokens, trace.timeout_ns, trace.unit, np.zeros(len(trace), np.int64))
    outcome = Outcome.of(arrivals)
    servers = [GroupServer(group, profile, trace, serving, outcome, seed + i) for i, group in enumerate(groups)]
    groups_of = [[i for i, group in enumerate(groups) if name in group.units] for name in trace.names]

    def goes_to(text: SimulatedText) -> int | None:
        """Returns the group with the least work that is not done. AlpaServe counts requests, which need not be alike here."""
        return min(groups_of[text.tenant], key=lambda group: servers[group].queue_ns, default=None)

    run(servers, arrivals, goes_to)
    end_ns = np.where(outcome.on_time, outcome.answered_ns, REFUSED).astype(float)
    return Attained(trace, end_ns, np.array([server.outcome.busy_ns for server in servers], float))
