"""`hplm bench generate`: decoders that generate text, beside transformers, whole models and other settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from bench.options import benchmark, expect_above_zero, seconds_option
from hplm.errors import InvalidInput

PARTS = ("transformers", "halves", "cleaning", "cache", "tenants", "swapped", "shares", "served", "cancelled", "overload")


@dataclass(frozen=True)
class GenerateBench:
    layers: int = 30  # SmolLM2-135M's shape: 30 layers of 576, 9 heads and 3 of keys, 49,152 tokens
    hidden: int = 576
    vocabulary: int = 49_152
    prompts: int = 16
    prompt_tokens: int = 64
    tenants: int = 10_000
    dedicated: int = 1_000  # tenants, if each has a whole model of its own
    resident: int = 20  # of their models fit in memory
    rounds: int = 3
    seconds: float = 20.0  # under overload

    def __post_init__(self) -> None:
        expect_above_zero(layers=self.layers, rounds=self.rounds, seconds=self.seconds)

    @property
    def lower(self) -> int:
        """The layers that are in the table of an hGPT."""
        return self.layers // 3


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "generate", run, "decoders that generate text", (
        "Generate with random weights of SmolLM2-135M's shape: whole models and hGPTs, one and many streams, one and many "
        "tenants, models of their own that take turns in memory; without a server, and served by Triton."
    ), layers=3, seconds=0.5, rounds=1)  # fmt: skip
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts to measure (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=GenerateBench.layers, help="layers (default: %(default)s)")
    seconds_option(parser, GenerateBench.seconds, "under overload")
    parser.add_argument("--rounds", type=int, default=GenerateBench.rounds, help="rounds of each part (default: %(default)s)")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.generate import bench_generate, table_of

    case, parts = GenerateBench(layers=args.layers, rounds=args.rounds, seconds=args.seconds), _parts(args.parts)
    figures = bench_generate(case, parts)
    if not args.json:
        print(table_of(figures))
    return figures


def _parts(given: str) -> Sequence[str]:
    parts = given.split(",")
    for part in parts:
        if part not in PARTS:
            raise InvalidInput(f"--parts has {part!r}: choose of {', '.join(PARTS)}")
    return parts
