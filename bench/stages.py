"""`hplm bench stages`: two stages of an engine on two cores, beside other ways to use them."""

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
class StagesBench:
    size: str = "bert-base"
    tokens: int = 32  # of a text
    batch_texts: int = 8
    tenants: int = 32
    slots: int = 128
    seconds: float = 30.0  # of each variant
    rounds: int = 6
    dtype: str = "fp32"
    rank: int = 32

    def __post_init__(self) -> None:
        expect_above_zero(seconds=self.seconds, rounds=self.rounds)
        expect_text(self.tokens, positions_of(self.size))


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "stages", run, "two stages on two cores, beside two engines", (
        "Saturate the upper half, without a server, on two cores: an engine of two stages, two engines of one core each, and "
        "one engine with both cores. Also an engine of one stage on a core, beside one without stages. All engines are "
        "processes of their own, and take turns. Stop other work on the machine first."
    ), size="toy", tokens=16, seconds=0.05)  # fmt: skip
    size_option(parser, StagesBench.size)
    tokens_option(parser, StagesBench.tokens)
    seconds_option(parser, StagesBench.seconds, "of each variant")
    dtype_option(parser)


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.stages import bench_stages, table_of

    figures = bench_stages(StagesBench(args.size, args.tokens, seconds=args.seconds, dtype=args.dtype))
    if not args.json:
        print(table_of(figures))
    return figures
