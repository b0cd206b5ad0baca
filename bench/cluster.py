"""`hplm bench cluster`: several servers behind HAProxy on this machine, beside one server, round robin, and the simulator."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from bench.options import benchmark, expect_above_zero, expect_text, seconds_option, tokens_option
from hplm.errors import InvalidInput

CLUSTER_SIZES = ("minilm", "bert-base", "toy")
PARTS = ("proxy", "faults", "changes", "revoke", "spread", "limits", "ring", "overflow", "simulation")
QUICK = {
    "size": "toy", "tokens": 16, "slots": 4, "connections": 8, "seconds": 2.0, "rounds": 1, "adds": 2, "table_mb": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class ClusterBench:
    size: str = "minilm"
    tokens: int = 32  # of a text
    slots: int = 16  # of a replica; there are four times as many tenants
    connections: int = 64
    seconds: float = 15.0  # of each timed measurement
    rounds: int = 3
    adds: int = 20  # tenants that come and go
    table_mb: float = 2000.0  # that travels while a key is revoked
    rate: float = 50.0  # requests a second that a tenant may send
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        expect_above_zero(slots=self.slots, connections=self.connections, seconds=self.seconds, rounds=self.rounds)
        expect_above_zero(adds=self.adds, table_mb=self.table_mb, rate=self.rate)
        expect_text(self.tokens, 512 if self.size != "toy" else 64)
        unknown = next((part for part in self.parts if part not in PARTS), None)
        if unknown is not None:
            raise InvalidInput(f"--only {unknown}: choose {', '.join(PARTS)}")

    @property
    def tenants(self) -> int:
        return 4 * self.slots

    def quick(self) -> ClusterBench:
        """Returns the same benchmark with little of everything."""
        return replace(self, **QUICK)


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "cluster", run, "several servers behind HAProxy, while they die, change and are replaced", (
        "Run `hplm cluster up` with two and with three servers on this machine. Measure what the router costs, how it spreads "
        "tenants, what clients see when a server is killed and when all are replaced, how soon changes of tenants are "
        "everywhere, and whether limits hold. Needs haproxy and nginx, and two cores."
    ))  # fmt: skip
    case = ClusterBench
    parser.add_argument("--size", choices=CLUSTER_SIZES, default=case.size, help="size of the model (default: %(default)s)")
    tokens_option(parser, case.tokens)
    seconds_option(parser, case.seconds, "of each timed measurement")
    parser.add_argument("--rounds", type=int, default=case.rounds, help="turns of each comparison (default: %(default)s)")
    parser.add_argument("--adds", type=int, default=case.adds, help="tenants that come and go (default: %(default)s)")
    parser.add_argument(
        "--table-mb",
        type=float,
        default=case.table_mb,
        help="of the table that travels while a key is revoked (default: %(default)s)",
    )
    parser.add_argument("--only", nargs="+", metavar="PART", default=list(PARTS), help=f"only these parts: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="little of everything: the figures mean nothing")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.cluster import bench_cluster, table_of

    case = ClusterBench(
        args.size, args.tokens, seconds=args.seconds, rounds=args.rounds, adds=args.adds, table_mb=args.table_mb,
        parts=tuple(args.only),
    )  # fmt: skip
    figures = bench_cluster(case.quick() if args.quick else case)
    if not args.json:
        print(table_of(figures))
    return figures
