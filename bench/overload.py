"""`hplm bench overload`: a server that gets more requests than it can answer in time."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from bench.options import benchmark, expect_above_zero, expect_text, positions_of, seconds_option, size_option, tokens_option


@dataclass(frozen=True)
class OverloadBench:
    size: str = "bert-base"
    tokens: int = 128  # of a text
    batch_texts: int = 8
    tenants: int = 16
    overload: float = 3.0  # multiple of the capacity
    deadlines: tuple[float, float] = (2.0, 12.0)  # in batch times, drawn uniformly between these
    seconds: float = 60.0  # of overload
    policy: str | None = None
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        expect_above_zero(batch_texts=self.batch_texts, overload=self.overload, seconds=self.seconds)
        expect_text(self.tokens, positions_of(self.size))
        if self.policy is not None:
            from hplm.scheduling.policy import policy

            policy(self.policy)


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "overload", run, "a server that gets more requests than it can answer in time", (
        "Send a real server a multiple of the requests that it can answer, with deadlines of some batch times. Measure how "
        "many it answers in time, how many it refuses, and how fast it refuses."
    ), size="toy", tokens=16, seconds=1.0)  # fmt: skip
    size_option(parser, OverloadBench.size)
    tokens_option(parser, OverloadBench.tokens)
    parser.add_argument(
        "--batch-texts",
        type=int,
        default=OverloadBench.batch_texts,
        help="texts of a batch; more if --tokens is small (default: %(default)s)",
    )
    parser.add_argument(
        "--overload", type=float, default=OverloadBench.overload, help="multiple of the capacity to send (default: %(default)s)"
    )
    parser.add_argument("--policy", default=OverloadBench.policy, help="scheduling policy (default: that of `hplm export`)")
    seconds_option(parser, OverloadBench.seconds, "of overload")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.overload import bench_overload

    case = OverloadBench(
        args.size, args.tokens, args.batch_texts, overload=args.overload, seconds=args.seconds, policy=args.policy
    )
    figures = bench_overload(case)
    if not args.json:
        print(json.dumps(figures, indent=2))
    return figures
