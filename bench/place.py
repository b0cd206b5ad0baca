"""`hplm bench place`: placement by search beside replication and other baselines, on simulators."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from bench.options import benchmark, expect_above_zero, seconds_option, size_option
from hplm.errors import InvalidInput


@dataclass(frozen=True)
class PlaceBench:
    seconds: float = 200.0  # of requests in each simulation
    seeds: int = 3
    day: bool = False

    def __post_init__(self) -> None:
        expect_above_zero(seconds=self.seconds, seeds=self.seeds)

    def quick(self) -> PlaceBench:
        return replace(self, seconds=20.0, seeds=1)


@dataclass(frozen=True)
class MeasuredBench:
    """One trace at real servers on two cores, with each deadline, beside the simulators."""

    size: str = "bert-base"
    dtype: str = "auto"
    tenants: int = 8
    load: float = 0.6  # share of the time that both cores would compute, if texts came one by one
    seconds: float = 25.0  # of requests, for each deadline and placement
    rounds: int = 5  # of the profile
    scales: tuple[float, ...] = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0)  # deadlines: multiples of a text's time on one core

    def __post_init__(self) -> None:
        expect_above_zero(measured_seconds=self.seconds, load=self.load)

    def quick(self) -> MeasuredBench:
        return replace(self, size="minilm", seconds=4.0, rounds=1, tenants=2, scales=(4.0,))


@dataclass(frozen=True)
class SharedBench:
    """Two backbones on two cores: a core for each, and both on both cores in two stages."""

    size: str = "bert-base"
    dtype: str = "auto"
    tenants: int = 4  # of each backbone
    load: float = 0.6  # share of the time that both cores would compute, if texts came one by one
    seconds: float = 25.0  # of requests, for each load and placement in each round
    rounds: int = 3

    def __post_init__(self) -> None:
        expect_above_zero(measured_seconds=self.seconds, load=self.load)

    def quick(self) -> SharedBench:
        return replace(self, size="minilm", seconds=3.0, rounds=1)


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "place", run, "placement by search beside replication, simulated", (
        "Simulate AlpaServe's models, from the paper's tables, on simulated devices: Table 2, Fig. 2, the highest rates with "
        "99 % of the requests in time (`python -m research.papers alpaserve` has the curves). Time the search, the screen and "
        "the full simulator: no model runs for these. --measured compares the simulators with real servers instead, and "
        "--shared measures Fig. 2 with real servers."
    ))  # fmt: skip
    seconds_option(parser, PlaceBench.seconds, "of requests in each simulation")
    parser.add_argument("--seeds", type=int, default=PlaceBench.seeds, help="loads to average over (default: %(default)s)")
    parser.add_argument("--day", action="store_true", help="also search for 3.5 million requests of a day on 64 devices")
    parser.add_argument(
        "--measured", action="store_true",
        help="only serve two placements on two cores of this machine, beside their simulation: stop other work first",
    )  # fmt: skip
    parser.add_argument(
        "--shared", action="store_true",
        help="only measure Fig. 2: serve two backbones on two cores of this machine, a core each and in two stages",
    )  # fmt: skip
    size_option(parser, MeasuredBench.size)
    parser.add_argument(
        "--measured-seconds", type=float, default=MeasuredBench.seconds,
        help="seconds of requests for each deadline or load, and placement (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="little of everything: the figures mean nothing")


def run(args: argparse.Namespace) -> dict:
    if args.measured and args.shared:
        raise InvalidInput("--measured and --shared are two measurements: give one of them")
    return _shared(args) if args.shared else _measured(args) if args.measured else _simulated(args)


def _shared(args: argparse.Namespace) -> dict:
    from bench.measuring.place_shared import bench_shared, table_of

    case = SharedBench(args.size, seconds=args.measured_seconds)
    figures = bench_shared(case.quick() if args.quick else case)
    if not args.json:
        print(table_of(figures))
    return figures


def _measured(args: argparse.Namespace) -> dict:
    from bench.measuring.place_measured import bench_measured, table_of

    case = MeasuredBench(args.size, seconds=args.measured_seconds)
    figures = bench_measured(case.quick() if args.quick else case)
    if not args.json:
        print(table_of(figures))
    return figures


def _simulated(args: argparse.Namespace) -> dict:
    from bench.measuring.place import bench_place, table_of

    case = PlaceBench(args.seconds, args.seeds, day=args.day)
    figures = bench_place(case.quick() if args.quick else case)
    if not args.json:
        print(table_of(figures))
    return figures
