"""`hplm bench tcb`: TCB's figures on the simulator, with rows, row length, slots and variance as axes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.options import benchmark, expect_above_zero, seconds_option, whole_numbers
from hplm.errors import InvalidInput


@dataclass(frozen=True)
class TcbBench:
    seconds: float = 3.0  # simulated for each figure
    rows: tuple[int, ...] = (4, 8, 16, 32, 64)  # B
    row_tokens: tuple[int, ...] = (100, 200, 300, 400)  # L
    slots: tuple[int, ...] = (1, 2, 4, 8, 16)  # of a row
    variances: tuple[int, ...] = (5, 20, 50, 100, 200)  # of the lengths
    rates: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0)  # multiples of the capacity without padding
    rate: float = 2.0  # where another axis varies
    deadlines_ms: tuple[float, float] = (100.0, 1000.0)
    batch_ms: float = 3.0  # the part of a batch's time that does not depend on its texts
    seed: int = 1

    def __post_init__(self) -> None:
        expect_above_zero(seconds=self.seconds, rate=self.rate, batch_ms=self.batch_ms)
        least, most = self.deadlines_ms
        if not 0 < least <= most:
            raise InvalidInput(f"--deadlines-ms {least} {most}: give the least and the most, both above 0")


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "tcb", run, "TCB's figures on the simulator", (
        "Simulate the settings of TCB's Figs. 9 to 12, 15 and 16: packings under DAS and under first come, first served, by "
        "request rate and variance of the lengths; policies by rows B, row length L and variance; slots of a row; and the "
        "share of a batch's time that a choice takes. Lengths are 3 to 100, normal, with mean 20."
    ), seconds=0.1, rows=[4, 16], row_tokens=[100], slots=[1, 4], variances=[20])  # fmt: skip
    seconds_option(parser, TcbBench.seconds, "to simulate for each figure")
    for option, name, of in (
        ("--rows", "rows", "rows of a batch, B"),
        ("--row-tokens", "row_tokens", "tokens of a row, L"),
        ("--slots", "slots", "slots of a row"),
        ("--variances", "variances", "variances of the lengths"),
    ):
        default = getattr(TcbBench, name)
        shown = ",".join(map(str, default))
        parser.add_argument(option, type=whole_numbers, default=list(default), help=f"{of}: several numbers (default: {shown})")
    parser.add_argument(
        "--rate", type=float, default=TcbBench.rate,
        help="request rate where another axis varies, as a multiple of the capacity (default: %(default)s)",
    )  # fmt: skip
    least, most = TcbBench.deadlines_ms
    parser.add_argument(
        "--deadlines-ms", type=float, nargs=2, default=(least, most), metavar=("LEAST", "MOST"),
        help=f"range from which the deadline of each text is drawn (default: {least:g} {most:g})",
    )  # fmt: skip
    parser.add_argument(
        "--batch-ms", type=float, default=TcbBench.batch_ms,
        help="time of a batch beside that of its tokens: large for a device that small batches do not fill "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--picture", type=Path, help="draw the figures into this file (.png, .svg, .pdf)")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.tcb import bench_tcb, table_of

    case = TcbBench(
        args.seconds,
        tuple(args.rows),
        tuple(args.row_tokens),
        tuple(args.slots),
        tuple(args.variances),
        rate=args.rate,
        deadlines_ms=tuple(args.deadlines_ms),
        batch_ms=args.batch_ms,
    )
    if args.picture:
        from builder.pictures import check_picture

        check_picture(args.picture)
    figures = bench_tcb(case)
    if args.picture:
        from bench.measuring.tcb_picture import draw

        draw(figures, args.picture)
    if not args.json:
        print(table_of(figures))
    return figures
