"""`hplm bench infinity`: served answers beside infinity-emb, an embedding server, in an environment of its own."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from bench.options import benchmark, dtype_option, expect_above_zero, expect_text, positions_of, seconds_option, tokens_option


@dataclass(frozen=True)
class InfinityBench:
    environment: Path = Path("infinity-venv")
    tokens: int = 128  # of a text
    seconds: float = 10.0  # of each measurement
    dtype: str = "auto"
    tenants: tuple[int, ...] = (1, 10_000)
    clients: int = 32

    def __post_init__(self) -> None:
        expect_above_zero(seconds=self.seconds)
        expect_text(self.tokens, positions_of("minilm"))


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "infinity", run, "served answers beside infinity-emb", (
        "Serve a MiniLM with random weights by infinity-emb (torch), and by hPLM for 1 and for 10,000 tenants. Measure 1 "
        "client and 32 with the same texts. infinity-emb answers with an embedding, hPLM with a label."
    ), size="toy", tokens=16, seconds=0.5)  # fmt: skip
    parser.add_argument(
        "--environment", type=Path, default=InfinityBench.environment,
        help="folder of infinity-emb's Python environment, which is made if it is missing (default: %(default)s)",
    )  # fmt: skip
    tokens_option(parser, InfinityBench.tokens)
    seconds_option(parser, InfinityBench.seconds, "of each measurement")
    dtype_option(parser, "of our engine; infinity-emb computes in bf16 where it does, else in fp32")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.infinity import bench_infinity

    figures = bench_infinity(InfinityBench(args.environment, args.tokens, args.seconds, args.dtype))
    if not args.json:
        print(json.dumps(figures, indent=2))
    return figures
