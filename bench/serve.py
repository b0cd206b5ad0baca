"""`hplm bench serve`: a real server beside the bare engine, with one number of tenants or several."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace

from bench.options import (
    benchmark,
    dtype_option,
    expect_above_zero,
    expect_text,
    positions_of,
    seconds_option,
    size_option,
    tokens_option,
    whole_numbers,
)


@dataclass(frozen=True)
class ServeBench:
    size: str = "bert-base"
    tokens: int = 128  # of a text
    tenants: int = 16
    seconds: float = 20.0  # of each measurement
    connections: int = 64  # at saturation
    dtype: str = "auto"
    rank: int = 32
    wrk: bool = False  # whether wrk drives the server, too

    def __post_init__(self) -> None:
        expect_above_zero(tenants=self.tenants, seconds=self.seconds, connections=self.connections)
        expect_text(self.tokens, positions_of(self.size))


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "serve", run, "a real server beside the bare engine", (
        "Export a repository of random weights and serve it. Measure one client, then saturation, beside the bare engine and "
        "beside an ensemble of two models that do nothing."
    ), size="toy", tokens=16, tenants=[4], seconds=0.5, connections=4)  # fmt: skip
    size_option(parser, ServeBench.size)
    tokens_option(parser, ServeBench.tokens)
    parser.add_argument(
        "--tenants", type=whole_numbers, default=[ServeBench.tenants],
        help=f"number of tenants, to which requests go in turn (default: {ServeBench.tenants}). Several numbers, such as "
        "1,10,100, also compare servers with as many tenants",
    )  # fmt: skip
    seconds_option(parser, ServeBench.seconds, "of each measurement")
    parser.add_argument(
        "--connections", type=int, default=ServeBench.connections, help="connections at saturation (default: %(default)s)"
    )
    dtype_option(parser)
    parser.add_argument(
        "--wrk", action="store_true", help="saturate the server with wrk as well (a Debian package), beside our generator"
    )


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.serve import bench_serve

    if args.wrk:
        from bench.tools.wrk import expect_wrk

        expect_wrk()
    case = ServeBench(
        args.size, args.tokens, seconds=args.seconds, connections=args.connections, dtype=args.dtype, wrk=args.wrk
    )
    if len(args.tenants) == 1:
        figures = bench_serve(replace(case, tenants=args.tenants[0]))
    else:
        from bench.measuring.tenants import bench_tenants

        figures = bench_serve(case) | bench_tenants(case, args.tenants)
    if not args.json:
        print(json.dumps(figures, indent=2))
    return figures
