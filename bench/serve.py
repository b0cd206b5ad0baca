"""`hplm bench serve`: what Triton and the glue cost over the bare engine, with one number of tenants or several."""

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

    def __post_init__(self) -> None:
        expect_above_zero(tenants=self.tenants, seconds=self.seconds, connections=self.connections)
        expect_text(self.tokens, positions_of(self.size))


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "serve", run, "a real server against the bare engine", (
        "Exports a repository of random weights, serves it, and measures one client, then saturation, beside the bare engine."
    ))  # fmt: skip
    size_option(parser, ServeBench.size)
    tokens_option(parser, ServeBench.tokens)
    parser.add_argument(
        "--tenants", type=whole_numbers, default=[ServeBench.tenants],
        help=f"requests go to them in turn (default: {ServeBench.tenants}); several numbers, 1,10,100, also compare servers "
        "with so many tenants",
    )  # fmt: skip
    seconds_option(parser, ServeBench.seconds, "of each measurement")
    parser.add_argument("--connections", type=int, default=ServeBench.connections, help="at saturation (default: %(default)s)")
    dtype_option(parser)


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.serve import bench_serve

    case = ServeBench(args.size, args.tokens, seconds=args.seconds, connections=args.connections, dtype=args.dtype)
    if len(args.tenants) == 1:
        figures = bench_serve(replace(case, tenants=args.tenants[0]))
    else:
        from bench.measuring.tenants import bench_tenants

        figures = bench_serve(case) | bench_tenants(case, args.tenants)
    if not args.json:
        print(json.dumps(figures, indent=2))
    return figures
