"""`hplm bench adapters`: the adapters of one layer, in batches of many tenants."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bench.options import benchmark, seconds_option


@dataclass(frozen=True)
class AdaptersBench:
    hidden: int = 768  # width of a vector
    rank: int = 32  # of an adapter
    seconds: float = 1.0  # for each figure
    tenants: tuple[int, ...] = (1, 4, 16, 64)  # in a batch


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "adapters", run, "adapters of one layer, for many tenants at once", (
        "Measure how long the adapters of one layer take for a batch of 1 to 64 tenants, beside a loop over tenants and beside "
        "peft."
    ), hidden=32, rank=4, seconds=0.005)  # fmt: skip
    parser.add_argument("--hidden", type=int, default=AdaptersBench.hidden, help="width of a vector (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=AdaptersBench.rank, help="rank of an adapter (default: %(default)s)")
    seconds_option(parser, AdaptersBench.seconds, "for each figure")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.adapters import bench_adapters, table_of

    figures = bench_adapters(AdaptersBench(args.hidden, args.rank, args.seconds))
    if not args.json:
        print(table_of(figures))
    return figures
