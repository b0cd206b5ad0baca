"""`hplm bench promises`: decoders under overload, by policy, on a virtual clock."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from bench.options import benchmark, expect_above_zero
from hplm.errors import InvalidInput


@dataclass(frozen=True)
class PromisesBench:
    requests: int = 600  # simulated for each rate and policy
    rates: tuple[float, ...] = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)  # of the capacity
    policies: tuple[str, ...] = ("timely", "fcfs", "sjf", "edf", "das")
    promise_ms: tuple[float, float] = (1000.0, 8000.0)  # until the first token, and for the whole answer
    share: float = 0.7  # of `max_tokens` that answers have
    cost_ms: tuple[float, float, float] = (20.0, 0.5, 0.5)  # of a step, and more for each of its tokens and sequences
    seats: int = 16
    cache_tokens: int = 4096
    tenants: int = 16
    seed: int = 1

    def __post_init__(self) -> None:
        expect_above_zero(requests=self.requests, seats=self.seats)
        first, whole = self.promise_ms
        if not (0 < first < math.inf and 0 < whole < math.inf):
            raise InvalidInput(f"--promise-ms {first:g} {whole:g}: give two numbers above 0")
        if not 0 < self.share <= 1:
            raise InvalidInput(f"--share {self.share:g}: give a number above 0, 1 at most")
        step, token, sequence = self.cost_ms
        if not (0 < step < math.inf and 0 <= token < math.inf and 0 <= sequence < math.inf):
            raise InvalidInput(f"--cost-ms {step:g} {token:g} {sequence:g}: give a step above 0, and no number below 0")
        from hplm.scheduling.policy import policy

        for name in self.policies:
            policy(name)


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "promises", run, "decoders under overload by policy, on a virtual clock", (
        "Simulate the line and the loop of decoders themselves: a step computes nothing and takes as long as --cost-ms says. "
        "Each request promises a time until its first token and one for its whole answer. Measure, for every policy and rate, "
        "the share of requests that are refused, and the share of the others that come within both promises. Prompts have 10 "
        "to 60 tokens, answers 8 to 128, geometrically distributed; arrivals are Poisson."
    ), requests=20, seats=4, policies=["timely", "fcfs"])  # fmt: skip
    case = PromisesBench
    parser.add_argument(
        "--requests", type=int, default=case.requests, help="to simulate for each rate and policy (default: %(default)s)"
    )
    parser.add_argument("--policies", nargs="+", default=case.policies, help=f"default: {' '.join(case.policies)}")
    parser.add_argument(
        "--promise-ms", type=float, nargs=2, default=case.promise_ms, metavar=("FIRST", "WHOLE"),
        help="promises for the first token and for the whole answer (default: {:g} {:g})".format(*case.promise_ms),
    )  # fmt: skip
    parser.add_argument(
        "--share", type=float, default=case.share, help="part of `max_tokens` that answers have (default: %(default)s)"
    )
    parser.add_argument(
        "--cost-ms", type=float, nargs=3, default=case.cost_ms, metavar=("STEP", "TOKEN", "SEQUENCE"),
        help="milliseconds of a step, and more for each token and sequence in it (default: {:g} {:g} {:g})".format(
            *case.cost_ms
        ),
    )  # fmt: skip
    parser.add_argument("--seats", type=int, default=case.seats, help="most sequences of a step (default: %(default)s)")


def run(args: argparse.Namespace) -> dict:
    case = PromisesBench(
        args.requests,
        policies=tuple(args.policies),
        promise_ms=tuple(args.promise_ms),
        share=args.share,
        cost_ms=tuple(args.cost_ms),
        seats=args.seats,
    )
    from bench.measuring.promises import bench_promises, table_of

    figures = bench_promises(case)
    if not args.json:
        print(table_of(figures))
    return figures
