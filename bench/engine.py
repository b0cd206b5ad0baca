"""`hplm bench engine`: the packings, and the engine beside bare matrix products."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bench.options import SIZE_NAMES, benchmark, dtype_option, seconds_option
from hplm.options import LAYER_DTYPES


@dataclass(frozen=True)
class EngineBench:
    sizes: tuple[str, ...] = SIZE_NAMES
    seconds: float = 3.0  # for each figure
    dtype: str = "auto"
    only_int8: bool = False


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "engine", run, "packings, and the engine beside bare matrix products", (
        "Measure the shared upper layers: five packings of texts of mixed lengths beside texts of one length, one text "
        "beside plain layers, texts of one length beside bare matrix products, several numbers of slots and batch sizes, and "
        "attention alone with causal masks and from targets to sources; batches of many sizes beside batches of one."
    ), size="toy", seconds=0.01, dtype="fp32")  # fmt: skip
    parser.add_argument(
        "--size", choices=(*SIZE_NAMES, "both"), default="both", help="size of the model (default: %(default)s)"
    )
    seconds_option(parser, EngineBench.seconds, "for each figure")
    dtype_option(parser, "of the layers; int8 is measured beside fp32 in any case", LAYER_DTYPES)
    parser.add_argument("--only-int8", action="store_true", help="only products in 8 bits, beside fp32 and ONNX Runtime")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.engine import bench_engine, table_of

    sizes = SIZE_NAMES if args.size == "both" else (args.size,)
    figures = bench_engine(EngineBench(sizes, args.seconds, args.dtype, args.only_int8))
    if not args.json:
        print(table_of(figures))
    return figures
