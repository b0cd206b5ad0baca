"""`hplm bench timeline`: what the threads of a loaded server do, batch by batch. `research.comparison.figures` draws it."""

from __future__ import annotations

import argparse
import json
from dataclasses import astuple, dataclass
from pathlib import Path

from bench.options import (
    benchmark,
    expect_above_zero,
    expect_text,
    positions_of,
    seconds_option,
    size_option,
    tokens_option,
)

FILE = "timeline.json"


@dataclass(frozen=True)
class TimelineBench:
    size: str = "minilm"
    tokens: int = 128  # of a text
    batch_texts: int = 8
    tenants: int = 64
    slots: int = 32  # fewer than tenants, so that adapters have to be copied to the device
    seconds: float = 5.0  # of load
    dtype: str = "auto"

    def __post_init__(self) -> None:
        expect_above_zero(seconds=self.seconds)
        expect_text(self.tokens, positions_of(self.size))


def register(kinds: argparse._SubParsersAction) -> None:
    parser = benchmark(kinds, "timeline", run, "what the threads of a loaded server do, batch by batch", (
        f"Load a real server that has more tenants than slots. Write the times of each thread, from the server's journal, to "
        f"{FILE} (HMI, Fig. 17)."
    ), size="toy", tokens=16, seconds=0.5)  # fmt: skip
    size_option(parser, TimelineBench.size)
    tokens_option(parser, TimelineBench.tokens)
    seconds_option(parser, TimelineBench.seconds, "of load")
    parser.add_argument("--results", type=Path, default=Path("results"), help=f"folder for {FILE} (default: %(default)s)")


def run(args: argparse.Namespace) -> dict:
    from bench.measuring.timeline import bench_timeline

    spans = bench_timeline(TimelineBench(args.size, args.tokens, seconds=args.seconds))
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / FILE
    path.write_text(json.dumps([astuple(span) for span in spans]) + "\n", "utf-8")
    if not args.json:
        print(f"{path}: {len(spans)} spans")
    return {"file": str(path), "spans": len(spans)}
