"""`hplm bench training`: a training step that reads the tables, beside steps that compute the lower layers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bench.options import benchmark, expect_above_zero, expect_text, positions_of, seconds_option, size_option, tokens_option


@dataclass(frozen=True)
class TrainingBench:
    size: str = "minilm"
    tokens: int = 64  # of a text
    texts: int = 8  # of a step
    seconds: float = 10.0  # for each figure

    def __post_init__(self) -> None:
        expect_above_zero(texts=self.texts, seconds=self.seconds)
        expect_text(self.tokens, positions_of(self.size))


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "training", run, "a training step that reads the tables", (
        "Measure a step of adapter training that reads the tables, beside steps that compute the lower layers: those of the "
        "original BERT, and those of the tables' windows. Weights are random."
    ), size="toy", tokens=12, texts=4, seconds=0.05)  # fmt: skip
    size_option(parser, TrainingBench.size)
    tokens_option(parser, TrainingBench.tokens)
    parser.add_argument("--texts", type=int, default=TrainingBench.texts, help="texts of a step (default: %(default)s)")
    seconds_option(parser, TrainingBench.seconds, "for each figure")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.training import bench_training, table_of

    figures = bench_training(TrainingBench(args.size, args.tokens, args.texts, args.seconds))
    if not args.json:
        print(table_of(figures))
    return figures
