"""`hplm bench pipeline`: the gain from staging a batch while another one computes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bench.options import (
    benchmark,
    dtype_option,
    expect_above_zero,
    expect_text,
    positions_of,
    seconds_option,
    size_option,
    tokens_option,
)


@dataclass(frozen=True)
class PipelineBench:
    size: str = "minilm"
    tokens: int = 32  # of a text
    batch_texts: int = 32
    tenants: int = 256
    slots: int = 64
    seconds: float = 10.0  # of each variant
    dtype: str = "auto"
    rank: int = 32

    def __post_init__(self) -> None:
        expect_above_zero(seconds=self.seconds)
        expect_text(self.tokens, positions_of(self.size))


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "pipeline", run, "staging a batch while another one computes", (
        "Saturate the upper half, without a server, in each way of overlapping staging and computing. There are more tenants "
        "than slots."
    ), size="toy", tokens=16, seconds=0.3, dtype="fp32")  # fmt: skip
    size_option(parser, PipelineBench.size)
    tokens_option(parser, PipelineBench.tokens)
    seconds_option(parser, PipelineBench.seconds, "of each variant")
    dtype_option(parser)


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.pipeline import bench_pipeline, table_of

    figures = bench_pipeline(PipelineBench(args.size, args.tokens, seconds=args.seconds, dtype=args.dtype))
    if not args.json:
        print(table_of(figures))
    return figures
