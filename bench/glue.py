"""`hplm bench glue`: what Triton and our Python cost when computing is free, beside two models that do nothing at all."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from bench.options import benchmark, expect_above_zero, expect_text, positions_of, seconds_option, tokens_option


@dataclass(frozen=True)
class GlueBench:
    tokens: int = 32  # of a text
    seconds: float = 5.0  # of each measurement
    tenants: int = 16
    lookups: int = 1  # instances of the lookup model

    def __post_init__(self) -> None:
        expect_above_zero(seconds=self.seconds, tenants=self.tenants, lookups=self.lookups)
        expect_text(self.tokens, positions_of("minilm"))


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "glue", run, "the served path around an engine that costs nothing", (
        "Serve a backbone of width 32 with one layer, and beside it two ensembles of two Python models that do nothing, with "
        "as many bytes between them: one answers from threads, one from `execute`. Measure one client, 64 and 256, and "
        "requests of 16 and of 64 texts, over HTTP; 64 clients over gRPC; and the processor time of each process a request."
    ), tokens=16, seconds=0.3)  # fmt: skip
    tokens_option(parser, GlueBench.tokens)
    seconds_option(parser, GlueBench.seconds, "of each measurement")
    parser.add_argument("--lookups", type=int, default=GlueBench.lookups, help="instances of lookup (default: %(default)s)")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.glue import bench_glue

    figures = bench_glue(GlueBench(args.tokens, args.seconds, lookups=args.lookups))
    if not args.json:
        print(json.dumps(figures, indent=2))
    return figures
