"""The full simulator: each group's own scheduler, as it serves, with simulated stages, all on one virtual clock.

The screen ranks placements; this one confirms the best. It batches, packs and drops texts as the server does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hplm.placement.attained import REFUSED, Attained
from hplm.placement.dispatch import shortest
from hplm.placement.placement import Group
from hplm.placement.profile import Profile
from hplm.placement.servers import GroupServer, Serving
from hplm.placement.workload import Trace
from hplm.scheduling.columns import NEVER
from hplm.scheduling.simulation.arrivals import Arrivals
from hplm.scheduling.simulation.server import Outcome


def simulate(groups: Sequence[Group], profile: Profile, trace: Trace, serving: Serving, seed: int = 0) -> Attained:
    """Returns what the groups' servers answer in time. Each unit is a tenant for them. The same seed gives the same result."""
    arrivals = Arrivals(trace.arrival_ns, trace.tokens, trace.timeout_ns, trace.unit, np.zeros(len(trace), np.int64))
    outcome = Outcome.of(arrivals)
    servers = [GroupServer(group, profile, trace, serving, outcome, seed + i) for i, group in enumerate(groups)]
    run_together(servers, arrivals, [[i for i, group in enumerate(groups) if name in group.units] for name in trace.names])
    end_ns = np.where(outcome.on_time, outcome.answered_ns, REFUSED).astype(float)
    return Attained(trace, end_ns, np.array([server.outcome.busy_ns for server in servers], float))


def run_together(servers: Sequence[GroupServer], arrivals: Arrivals, groups_of: Sequence[Sequence[int]]) -> None:
    """Goes from event to event. A server is asked for its next event again after each of its own ones only."""
    texts = list(map(arrivals.text, range(len(arrivals))))
    arrival_ns = [*arrivals.at_ns.tolist(), NEVER]
    events = [server.next(0) for server in servers]
    arriving = now = 0
    while True:
        earliest = min(events, default=NEVER)
        now = max(now, min(arrival_ns[arriving], earliest))
        if now == NEVER:
            return
        touched = [i for i, at in enumerate(events) if at <= now] if earliest <= now else []
        for i in touched:
            servers[i].advance(now)
        while arrival_ns[arriving] <= now:
            text = texts[arriving]
            arriving += 1
            candidates = groups_of[text.tenant]
            if not candidates:
                continue
            chosen = shortest([server.queue_ns for server in servers], candidates)
            if chosen not in touched:
                servers[chosen].advance(now)
                touched.append(chosen)
            servers[chosen].arrive(text, now)
        for i in touched:
            servers[i].choose(now)
            events[i] = servers[i].next(now)
