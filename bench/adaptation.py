"""`hplm bench adaptation`: where a step of a root's adaptation spends its time."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bench.options import benchmark, dtype_option, expect_above_zero, seconds_option, size_option
from hplm.options import LAYER_DTYPES


@dataclass(frozen=True)
class AdaptationBench:
    size: str = "minilm"
    seconds: float = 20.0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        expect_above_zero(seconds=self.seconds)


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "adaptation", run, "where a step of a root's adaptation spends its time", (
        "Measure the parts of a step in which a root learns: the teacher, the lower layers on windows, the upper layers, their "
        "gradients, and the change of the weights. Weights and texts are random."
    ), size="toy", seconds=0.05)  # fmt: skip
    size_option(parser, AdaptationBench.size)
    seconds_option(parser, AdaptationBench.seconds, "of all steps together")
    dtype_option(parser, "of the products", LAYER_DTYPES)


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.adaptation import bench_adaptation, table_of

    figures = bench_adaptation(AdaptationBench(args.size, args.seconds, args.dtype))
    if not args.json:
        print(table_of(figures))
    return figures
