"""`hplm bench generate`: decoders that generate text, beside transformers and whole models."""

from __future__ import annotations

from typing import Literal, get_args

from bench.measuring.decoders import GenerateBench
from bench.measuring.generate import bench_generate
from bench.rows import Positive, Rows, Whole, benchmark, rows_of

Part = Literal["transformers", "halves", "tenants", "swapped", "served", "cancelled", "overload"]


@benchmark(layers=3, seconds=0.5, rounds=1, parts=("halves", "tenants", "overload"))
def generate(
    *, parts: tuple[Part, ...] = get_args(Part), layers: Whole = 30, seconds: Positive = 20.0, rounds: Whole = 3
) -> Rows:
    """Generates with random weights of SmolLM2-135M's shape: whole models and hGPTs, one and many streams and tenants.

    Also models of their own that take turns in memory; without a server, and served by Triton.

    :param parts: which to measure
    :param layers: of the model
    :param seconds: under overload
    :param rounds: of each part
    """
    yield from rows_of(bench_generate(GenerateBench(layers=layers, rounds=rounds, seconds=seconds), parts))
