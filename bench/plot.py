"""`hplm bench plot`: the time of a lookup in a table, beside the layers that the table replaces."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from bench.options import benchmark, dtype_option, seconds_option, tokens_option
from hplm.errors import InvalidInput
from hplm.options import LAYER_DTYPES


def _two_batches() -> int:
    from hplm.plot.writing import BATCH

    return 2 * BATCH


def _bert_vocabulary() -> int:
    from testing.random_store import BERT_BASE

    return BERT_BASE.vocabulary


@dataclass(frozen=True)
class PlotBench:
    keys: int = 1_000_000  # n-grams in the table
    window: int = 3  # tokens of an n-gram
    hidden: int = 768  # width of a vector
    tokens: int = 128  # of a text
    seconds: float = 3.0  # for each figure
    dtype: str = "auto"  # of the layers that the table replaces
    count_tokens: int = 5_000_000  # in the corpus whose n-grams are counted
    build_keys: int = field(default_factory=_two_batches)  # n-grams whose values are computed and written
    vocabulary: int = field(default_factory=_bert_vocabulary)

    def __post_init__(self) -> None:
        if self.keys < 1 or self.hidden < 1 or self.tokens < 3 or not self.seconds > 0 or self.count_tokens < 0:
            raise InvalidInput("keys, hidden and seconds must be above 0, tokens at least 3")


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "plot", run, "lookup, gathering, cold reads and building of a table", (
        "Write tables of random values with realistic key statistics. Measure one text on one thread, beside the layers that "
        "a table replaces. A million keys of width 768 take 8 GB of disk and some minutes."
    ), keys=3000, hidden=32, tokens=16, seconds=0.01, count_tokens=20_000)  # fmt: skip
    parser.add_argument("--keys", type=int, default=PlotBench.keys, help="n-grams in the table (default: %(default)s)")
    parser.add_argument("--window", type=int, default=PlotBench.window, help="tokens of an n-gram (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=PlotBench.hidden, help="width of a vector (default: %(default)s)")
    tokens_option(parser, PlotBench.tokens)
    seconds_option(parser, PlotBench.seconds, "for each figure")
    parser.add_argument(
        "--count-tokens", type=int, default=PlotBench.count_tokens, help="tokens of the corpus to count (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="folder on a disk, in which the tables are kept for the next run")
    dtype_option(parser, "of the layers that the table replaces", LAYER_DTYPES)


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.plot import bench_plot, table_of

    case = PlotBench(args.keys, args.window, args.hidden, args.tokens, args.seconds, args.dtype, args.count_tokens)
    figures = bench_plot(case, args.folder)
    if not args.json:
        print(table_of(figures))
    return figures
