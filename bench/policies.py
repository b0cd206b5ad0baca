"""`hplm bench policies`: policies and packings in pairs, each on a real server that gets more than it can answer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bench.options import benchmark, expect_above_zero, seconds_option, size_option


@dataclass(frozen=True)
class PoliciesBench:
    size: str = "bert-base"
    policies: tuple[str, ...] = ("fcfs", "das:row_tokens=128", "slotted_das:row_tokens=128")
    packings: tuple[str, ...] = ("packed", "concat", "slotted")
    variance: float = 100.0  # of the lengths
    batch_tokens: int = 640
    tenants: int = 16
    overload: float = 2.0  # multiple of the capacity of the first pair
    deadlines: tuple[float, float] = (1.0, 8.0)  # in batch times, drawn uniformly between these
    seconds: float = 20.0  # of overload, for each pair
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        expect_above_zero(variance=self.variance, batch_tokens=self.batch_tokens, overload=self.overload, seconds=self.seconds)
        from hplm.engine.packing import read_packing
        from hplm.scheduling.policy import policy

        for name in self.policies:
            policy(name)
        for name in self.packings:
            read_packing(name, lambda texts, tokens: 0.0)


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "policies", run, "policies and packings in pairs, on a real server", (
        "Serve random weights with each pair of a policy and a packing, one after the other. Send the same texts to each, at a "
        "multiple of the rate that first come, first served answers with the packing `packed`. That pair is measured again "
        "before and after each other one. Lengths are 3 to 100, normal, with mean 20. No request is refused on arrival; they "
        "expire."
    ), size="toy", seconds=1.0)  # fmt: skip
    size_option(parser, PoliciesBench.size)
    for option, default in (("--policies", PoliciesBench.policies), ("--packings", PoliciesBench.packings)):
        parser.add_argument(option, nargs="+", default=default, help=f"default: {' '.join(default)}")
    parser.add_argument(
        "--variance", type=float, default=PoliciesBench.variance, help="variance of the lengths (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=PoliciesBench.batch_tokens, help="most tokens in a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--overload", type=float, default=PoliciesBench.overload, help="multiple of the capacity to send (default: %(default)s)"
    )
    seconds_option(parser, PoliciesBench.seconds, "of overload, for each pair")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.policies import bench_policies, table_of

    case = PoliciesBench(
        args.size,
        tuple(args.policies),
        tuple(args.packings),
        args.variance,
        args.batch_tokens,
        overload=args.overload,
        seconds=args.seconds,
    )
    figures = bench_policies(case)
    if not args.json:
        print(table_of(figures))
    return figures
