"""`hplm bench cascade`: plans of levels beside the full stack alone, a vote, and simpler ways to spare layers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from bench.options import benchmark, dtype_option, expect_above_zero, seconds_option
from hplm.errors import InvalidInput

ALL = 100_000  # texts: as many as there are
TIMED = ("nothing", "bare", "served")  # each with those before it
QUICK = {"train": 300, "epochs": 1, "seeds": 1, "minutes": 0.05, "stack_minutes": 0.02, "seconds": 1.0, "rounds": 1}
SHORT = {"calibrate": 150, "profile": 150, "test": 150}  # texts


@dataclass(frozen=True)
class CascadeBench:
    folder: Path = Path(".hplm/bench-cascade")  # what is built, which later runs use again
    model: str | None = None  # None: the demo's MiniLM
    lower: int = 2  # layers that become a table; the others are the full upper stack
    stacks: tuple[int, ...] = (1, 2, 3)  # layers of each
    seeds: int = 3  # tenants for each question
    drop: float = 0.5  # points that a plan may lose where it is selected
    minutes: float = 6.0  # of adapting the lower half
    stack_minutes: float = 4.0  # of each stack's learning
    train: int = 1500  # texts of each tenant
    calibrate: int = ALL
    profile: int = ALL
    test: int = ALL
    epochs: int = 3
    seconds: float = 20.0  # of each timed measurement
    rounds: int = 3
    dtype: str = "auto"
    timed: str = TIMED[-1]

    def __post_init__(self) -> None:
        expect_above_zero(seeds=self.seeds, minutes=self.minutes, stack_minutes=self.stack_minutes)
        expect_above_zero(seconds=self.seconds, rounds=self.rounds)
        if not 0 <= self.drop <= 100:
            raise InvalidInput(f"--drop {self.drop:g}: give points from 0 to 100")

    def quick(self) -> CascadeBench:
        """Returns the same benchmark with little of everything."""
        return replace(self, **QUICK, **SHORT)


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "cascade", run, "levels and plans beside the full stack alone", (
        "Build tenants with levels on stacks of 1, 2 and 3 layers, from the docstrings of Python's library and MiniLM, and "
        "select plans for them. Measure what the plans lose on test texts, and what they save in latency, throughput and in "
        "an overload, beside the full stack alone, one small level, a vote of all levels, and simpler ways. What is built is "
        "kept in the folder, so that a second run only measures."
    ))  # fmt: skip
    case = CascadeBench
    parser.add_argument("--folder", type=Path, default=case.folder, help="what is built (default: %(default)s)")
    parser.add_argument("--model", help="Hugging Face name or folder of another BERT than MiniLM")
    parser.add_argument("--seeds", type=int, default=case.seeds, help="tenants for each question (default: %(default)s)")
    parser.add_argument(
        "--drop",
        type=float,
        default=case.drop,
        metavar="POINTS",
        help="most points that a plan may lose (default: %(default)s)",
    )
    parser.add_argument("--minutes", type=float, default=case.minutes, help="of adapting the lower half (default: %(default)s)")
    parser.add_argument(
        "--stack-minutes", type=float, default=case.stack_minutes, help="of each stack's learning (default: %(default)s)"
    )
    seconds_option(parser, case.seconds, "of each timed measurement")
    parser.add_argument(
        "--rounds", type=int, default=case.rounds, help="turns of each timed measurement (default: %(default)s)"
    )
    dtype_option(parser)
    parser.add_argument(
        "--timed", choices=TIMED, default=TIMED[-1],
        help="what is timed: nothing, the bare engine, or a server too (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="little of everything: the figures mean nothing")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.cascade import bench_cascade, table_of

    case = CascadeBench(
        args.folder, args.model, seeds=args.seeds, drop=args.drop, minutes=args.minutes, stack_minutes=args.stack_minutes,
        seconds=args.seconds, rounds=args.rounds, dtype=args.dtype, timed=args.timed,
    )  # fmt: skip
    figures = bench_cascade(case.quick() if args.quick else case)
    if not args.json:
        print(table_of(figures))
    return figures
