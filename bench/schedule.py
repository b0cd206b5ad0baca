"""`hplm bench schedule`: every policy on the same simulated requests, on a virtual clock."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from bench.options import benchmark, expect_above_zero, seconds_option
from hplm.errors import InvalidInput


@dataclass(frozen=True)
class ScheduleBench:
    seconds: float = 3.0  # simulated for each rate and policy
    rates: tuple[float, ...] = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
    allowed_ms: tuple[float, float] = (50.0, 300.0)
    cv: float = 1.0  # coefficient of variation of the gaps between arrivals
    commit_ms: float | None = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        expect_above_zero(seconds=self.seconds, cv=self.cv)
        least, most = self.allowed_ms
        if not 0 < least <= most:
            raise InvalidInput(f"--deadlines-ms {least} {most}: give the least and the most, both above 0")


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "schedule", run, "policies against each other, on a virtual clock", (
        "Simulate the server's own scheduler. Measure the utility (as in TCB: 1 / length of each text that starts in time) and "
        "the share of texts answered in time, for every policy and rate. With --trace, replay arrivals that were recorded from "
        "a server instead."
    ), seconds=0.05)  # fmt: skip
    seconds_option(parser, ScheduleBench.seconds, "to simulate for each rate and policy")
    parser.add_argument(
        "--cv",
        type=float,
        default=ScheduleBench.cv,
        help="coefficient of variation of the gaps between arrivals, which follow a Gamma distribution; 1 is Poisson "
        "(default: %(default)s)",
    )
    least, most = ScheduleBench.allowed_ms
    parser.add_argument(
        "--deadlines-ms", type=float, nargs=2, default=(least, most), metavar=("LEAST", "MOST"),
        help=f"range from which the deadline of each text is drawn (default: {least:g} {most:g})",
    )  # fmt: skip
    parser.add_argument("--picture", type=Path, help="draw the figures into this file (.png, .svg, .pdf)")
    parser.add_argument("--trace", type=Path, help="JSONL of arrival (s), tokens, deadline_ms, tenant")
    parser.add_argument(
        "--cost", type=float, nargs=3, metavar=("BATCH", "TOKEN", "TEXT"), default=(3e6, 21e3, 0.0),
        help="with --trace: nanoseconds of a batch, a token and a text, as learned by the server (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--policy", default="timely", help="with --trace: scheduling policy (default: %(default)s)")
    parser.add_argument(
        "--batch-tokens", type=int, default=1280, help="with --trace: most tokens in a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--commit-ms",
        type=float,
        help="with --trace: how long before the engine is free a batch is chosen (default: a whole batch ahead)",
    )
    parser.add_argument(
        "--admission", action="store_true", help="with --trace: refuse requests that cannot be answered in time"
    )


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.schedule import bench_schedule, replay, table_of

    if args.trace:
        figures = replay(args.trace, tuple(args.cost), args.policy, args.batch_tokens, args.commit_ms, args.admission)
        if not args.json:
            print(json.dumps(figures, indent=2))
        return figures
    case = ScheduleBench(args.seconds, allowed_ms=tuple(args.deadlines_ms), cv=args.cv)
    if args.picture:
        from builder.pictures import check_picture

        check_picture(args.picture)
    figures = bench_schedule(case)
    if args.picture:
        from bench.measuring.schedule_picture import draw

        draw(figures, args.picture)
    if not args.json:
        print(table_of(figures))
    return figures
