"""`hplm bench cluster`: several servers behind HAProxy on this machine, beside one server and round robin."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from bench.cluster_changes import change_figures, revoke_figures
from bench.cluster_faults import kill_figures, roll_figures
from bench.cluster_material import ClusterBench, make_material
from bench.cluster_proxy import proxy_figures
from bench.cluster_spread import limit_figures, spread_figures
from bench.rows import Positive, Rows, Size, Whole, benchmark, rows_of, say
from hplm.errors import HplmError
from loadtest.server import ServedCluster

TARGETS = {
    "proxy_over_direct": (">=", 0.95),
    "hop_p50_ms": ("<=", 0.5),
    "hash_over_round_robin": ("<=", 0.5),
    "busiest_over_mean": ("<=", 1.3),
    "kill_unanswered": ("<=", 0),
    "kill_wrong": ("<=", 0),
    "reroute_s": ("<=", 2.0),
    "roll_failures": ("<=", 0),
    "add_p99_s": ("<=", 1.0),
    "after_delete": ("<=", 0),
    "revoke_s": ("<=", 1.0),
    "revoked_while_travelling": (">=", 1),  # replicas; else the table was too small
    "limit_ratio": ("<=", 1.05),
    "limit_least": (">=", 0.9),  # else the limit was not reached
}
Part = Literal["proxy", "faults", "changes", "revoke", "spread", "limits"]
WITH_TWO = {
    "proxy": (proxy_figures,),
    "changes": (change_figures,),
    "revoke": (revoke_figures,),
    "faults": (kill_figures, roll_figures),
}
WITH_THREE = {"spread": (spread_figures,), "limits": (limit_figures,)}


@benchmark(size="toy", tokens=16, slots=4, connections=8, seconds=2.0, rounds=1, adds=2, table_mb=1.0, only=("proxy", "faults"))
def cluster(
    *,
    size: Size = "minilm",
    tokens: Whole = 32,
    slots: Whole = 16,
    connections: Whole = 64,
    seconds: Positive = 15.0,
    rounds: Whole = 3,
    adds: Whole = 20,
    table_mb: Positive = 2000.0,
    only: tuple[Part, ...] = (*WITH_TWO, *WITH_THREE),  # pyright: ignore[reportArgumentType]
) -> Rows:
    """Runs `hplm cluster up` with two and with three servers on this machine.

    Measures what the router costs, how it spreads tenants, what clients see when a server is killed and when all are replaced,
    how soon changes of tenants are everywhere, and whether limits hold. Needs haproxy, and two cores.

    :param size: of the model
    :param tokens: of a text
    :param slots: of a server; there are four times as many tenants
    :param connections: of the clients
    :param seconds: of each timed measurement
    :param rounds: turns of each comparison
    :param adds: tenants that come and go
    :param table_mb: of the table that travels while a key is revoked
    :param only: these parts
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise HplmError("this machine has one core, but each of two servers needs its own: use another machine")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hplm-") as folder:  # a short path, for sockets
        case = ClusterBench(size, tokens, slots, connections, seconds, rounds, adds, table_mb)
        material = make_material(Path(folder), case)
        for count, parts, on in ((2, WITH_TWO, cores), (3, WITH_THREE, ())):
            if wanted := [part for part in parts if part in only]:
                say(f"{count} servers")
                with ServedCluster(material.repository, Path(folder) / str(count), count, on) as servers:
                    for measure in (measure for part in wanted for measure in parts[part]):
                        figures |= measure(servers, material)
    yield from rows_of(figures, TARGETS)
