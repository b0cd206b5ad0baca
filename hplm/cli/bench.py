"""`hplm bench`: figures, each with its baseline in the same run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def register(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser("bench", help="measure this machine: figures with their baselines")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="WHAT")
    serve = kinds.add_parser("serve", help="a real server against the bare engine", description=(
        "Exports a repository of random weights, serves it, and measures one client, then saturation, beside the bare engine."
    ))  # fmt: skip
    serve.add_argument("--size", choices=("bert-base", "minilm"), default="bert-base", help="default: %(default)s")
    serve.add_argument("--tokens", type=int, default=128, help="of a text (default: %(default)s)")
    serve.add_argument(
        "--tenants", type=_counts, default=[16],
        help="requests go to them in turn (default: 16); several numbers, 1,10,100, also compare servers with so many tenants",
    )  # fmt: skip
    serve.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default: %(default)s)")
    serve.add_argument("--connections", type=int, default=64, help="at saturation (default: %(default)s)")
    serve.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    serve.add_argument("--json", action="store_true", help="end with one line of JSON")
    serve.set_defaults(run=run_serve)
    plot = kinds.add_parser("plot", help="lookups, gathering, cold reads and building of a table", description=(
        "Writes tables of random values with real key statistics, and measures one text on one thread, beside the layers that "
        "a table replaces. A million keys of width 768 take 8 GB of disk and some minutes."
    ))  # fmt: skip
    plot.add_argument("--keys", type=int, default=1_000_000, help="n-grams in the table (default: %(default)s)")
    plot.add_argument("--hidden", type=int, default=768, help="width of a vector (default: %(default)s)")
    plot.add_argument("--tokens", type=int, default=128, help="of a text (default: %(default)s)")
    plot.add_argument("--seconds", type=float, default=3.0, help="for each figure (default: %(default)s)")
    plot.add_argument("--count-tokens", type=int, default=5_000_000, help="count the n-grams of so many (default: %(default)s)")
    plot.add_argument("--folder", type=Path, help="on a disk: keep the tables there, and use them again")
    plot.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="of the layers it is compared with")
    plot.add_argument("--json", action="store_true", help="end with one line of JSON")
    plot.set_defaults(run=run_plot)
    adapters = kinds.add_parser("adapters", help="one layer's adapters for many tenants at once", description=(
        "Measures the step of one layer for a batch of 1 to 64 tenants, beside a loop over tenants and beside peft."
    ))  # fmt: skip
    adapters.add_argument("--hidden", type=int, default=768, help="width of a vector (default: %(default)s)")
    adapters.add_argument("--rank", type=int, default=32, help="of an adapter (default: %(default)s)")
    adapters.add_argument("--seconds", type=float, default=1.0, help="for each figure (default: %(default)s)")
    adapters.add_argument("--json", action="store_true", help="end with one line of JSON")
    adapters.set_defaults(run=run_adapters)
    engine = kinds.add_parser("engine", help="packings, and how far the engine is from bare matrix products", description=(
        "Measures the shared upper layers on texts of mixed lengths: five packings beside texts of one length, a batch of one "
        "beside plain layers, equal lengths beside bare matrix products, and sweeps over slots and batch sizes."
    ))  # fmt: skip
    engine.add_argument("--size", choices=("minilm", "bert-base", "both"), default="both", help="default: %(default)s")
    engine.add_argument("--seconds", type=float, default=3.0, help="for each figure (default: %(default)s)")
    engine.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    engine.add_argument("--json", action="store_true", help="end with one line of JSON")
    engine.set_defaults(run=run_engine)
    pipeline = kinds.add_parser("pipeline", help="making a batch ready while another computes", description=(
        "Saturates the upper half, without a server, in each way of overlapping staging and computing; more tenants than slots."
    ))  # fmt: skip
    pipeline.add_argument("--size", choices=("bert-base", "minilm"), default="minilm", help="default: %(default)s")
    pipeline.add_argument("--tokens", type=int, default=32, help="of a text (default: %(default)s)")
    pipeline.add_argument("--seconds", type=float, default=10.0, help="of each variant (default: %(default)s)")
    pipeline.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    pipeline.add_argument("--json", action="store_true", help="end with one line of JSON")
    pipeline.set_defaults(run=run_pipeline)
    overload = kinds.add_parser("overload", help="a server that is asked for more than it can do", description=(
        "Offers a real server a multiple of its capacity with deadlines of some batch times: what is answered in time, what is "
        "refused, and how soon."
    ))  # fmt: skip
    overload.add_argument("--size", choices=("bert-base", "minilm"), default="bert-base", help="default: %(default)s")
    overload.add_argument("--tokens", type=int, default=128, help="of a text (default: %(default)s)")
    overload.add_argument("--batch-texts", type=int, default=8, help="of a batch; more if short (default: %(default)s)")
    overload.add_argument("--overload", type=float, default=3.0, help="times the capacity (default: %(default)s)")
    overload.add_argument("--policy", default=None, help="default: what is exported by default")
    overload.add_argument("--seconds", type=float, default=60.0, help="of the overload (default: %(default)s)")
    overload.add_argument("--json", action="store_true", help="end with one line of JSON")
    overload.set_defaults(run=run_overload)
    training = kinds.add_parser("training", help="a step of fine-tuning from the tables", description=(
        "Measures a step of adapter training that reads the tables, beside one that computes the lower layers, of the original "
        "BERT and on the tables' windows. Random weights."
    ))  # fmt: skip
    training.add_argument("--size", choices=("bert-base", "minilm"), default="minilm", help="default: %(default)s")
    training.add_argument("--tokens", type=int, default=64, help="of a text (default: %(default)s)")
    training.add_argument("--texts", type=int, default=8, help="of a step (default: %(default)s)")
    training.add_argument("--seconds", type=float, default=10.0, help="for each figure (default: %(default)s)")
    training.add_argument("--json", action="store_true", help="end with one line of JSON")
    training.set_defaults(run=run_training)

    _schedule(kinds)


def _counts(given: str) -> list[int]:
    parts = given.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{given!r}: whole numbers above 0, such as 16 or 1,10,100")
    return [int(part) for part in parts]


def run_serve(args: argparse.Namespace) -> dict:
    from bench.measuring.serve import Case, bench_serve

    if len(args.tenants) == 1:
        figures = bench_serve(Case(args.size, args.tokens, args.tenants[0], args.seconds, args.connections, args.dtype))
    else:
        from bench.measuring.tenants import bench_tenants

        case = Case(args.size, args.tokens, seconds=args.seconds, connections=args.connections, dtype=args.dtype)
        figures = bench_serve(case) | bench_tenants(case, args.tenants)
    if not args.json:
        print(json.dumps(figures, indent=2))
    return figures


def _schedule(kinds: argparse._SubParsersAction) -> None:
    schedule = kinds.add_parser("schedule", help="policies against each other, on a virtual clock", description=(
        "Simulates the server's own scheduler: utility (TCB's: 1 / length of each text started in time) and the share of texts "
        "answered in time, for every policy and rate. With --trace, replays arrivals recorded from a server instead."
    ))  # fmt: skip
    schedule.add_argument("--seconds", type=float, default=3.0, help="simulated, a rate and policy (default: %(default)s)")
    schedule.add_argument("--cv", type=float, default=1.0, help="of the gaps between arrivals, Gamma; 1 is Poisson")
    schedule.add_argument("--deadlines-ms", type=float, nargs=2, default=(50.0, 300.0), metavar=("LEAST", "MOST"))
    schedule.add_argument("--picture", type=Path, help="draw it here (.png, .svg, .pdf)")
    schedule.add_argument("--trace", type=Path, help="JSONL of arrival (s), tokens, deadline_ms, tenant")
    schedule.add_argument(
        "--cost", type=float, nargs=3, metavar=("BATCH", "TOKEN", "TEXT"), default=(3e6, 21e3, 0.0),
        help="with --trace: nanoseconds, as the server's cost model has learnt them (default: %(default)s)",
    )  # fmt: skip
    schedule.add_argument("--policy", default="timely", help="with --trace (default: %(default)s)")
    schedule.add_argument("--batch-tokens", type=int, default=1280, help="with --trace (default: %(default)s)")
    schedule.add_argument("--commit-ms", type=float, help="with --trace: how early a batch is chosen (default: a batch ahead)")
    schedule.add_argument("--admission", action="store_true", help="with --trace: refuse what cannot be in time")
    schedule.add_argument("--json", action="store_true", help="end with one line of JSON")
    schedule.set_defaults(run=run_schedule)


def run_schedule(args: argparse.Namespace) -> dict:
    from bench.measuring.schedule import Case, bench_schedule, replay, table_of

    if args.trace:
        figures = replay(args.trace, tuple(args.cost), args.policy, args.batch_tokens, args.commit_ms, args.admission)
        if not args.json:
            print(json.dumps(figures, indent=2))
        return figures
    case = Case(args.seconds, allowed_ms=tuple(args.deadlines_ms), cv=args.cv)
    if args.picture:
        from builder.pictures import check_picture

        check_picture(args.picture)
    figures = bench_schedule(case)
    if args.picture:
        from bench.measuring.schedule_picture import draw

        draw(figures, args.picture)
    if not args.json:
        print(table_of(figures))
    return figures


def run_plot(args: argparse.Namespace) -> dict:
    from bench.measuring.plot import bench_plot, table_of
    from bench.measuring.plot_tables import Case

    case = Case(args.keys, args.hidden, args.tokens, args.seconds, args.dtype, args.count_tokens)
    figures = bench_plot(case, args.folder)
    if not args.json:
        print(table_of(figures))
    return figures


def run_adapters(args: argparse.Namespace) -> dict:
    from bench.measuring.adapters import Case, bench_adapters, table_of

    figures = bench_adapters(Case(args.hidden, args.rank, args.seconds))
    if not args.json:
        print(table_of(figures))
    return figures


def run_engine(args: argparse.Namespace) -> dict:
    from bench.measuring.engine import SIZES, Case, bench_engine, table_of

    figures = bench_engine(Case(tuple(SIZES) if args.size == "both" else (args.size,), args.seconds, args.dtype))
    if not args.json:
        print(table_of(figures))
    return figures


def run_pipeline(args: argparse.Namespace) -> dict:
    from bench.measuring.pipeline import Case, bench_pipeline, table_of

    figures = bench_pipeline(Case(args.size, args.tokens, seconds=args.seconds, dtype=args.dtype))
    if not args.json:
        print(table_of(figures))
    return figures


def run_overload(args: argparse.Namespace) -> dict:
    from bench.measuring.overload import Case, bench_overload

    case = Case(args.size, args.tokens, args.batch_texts, overload=args.overload, seconds=args.seconds, policy=args.policy)
    figures = bench_overload(case)
    if not args.json:
        print(json.dumps(figures, indent=2))
    return figures


def run_training(args: argparse.Namespace) -> dict:
    from bench.measuring.training import Case, bench_training, table_of

    figures = bench_training(Case(args.size, args.tokens, args.texts, args.seconds))
    if not args.json:
        print(table_of(figures))
    return figures
