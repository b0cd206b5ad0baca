"""`hplm bench`: figures, each with its baseline in the same run."""

from __future__ import annotations

import argparse
import json


def register(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser("bench", help="measure this machine: figures with their baselines")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="WHAT")
    serve = kinds.add_parser("serve", help="a real server against the bare engine", description=(
        "Exports a repository of random weights, serves it, and measures one client, then saturation, beside the bare engine."
    ))  # fmt: skip
    serve.add_argument("--size", choices=("bert-base", "minilm"), default="bert-base", help="default: %(default)s")
    serve.add_argument("--tokens", type=int, default=128, help="of a text (default: %(default)s)")
    serve.add_argument("--tenants", type=int, default=16, help="requests go to them in turn (default: %(default)s)")
    serve.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default: %(default)s)")
    serve.add_argument("--connections", type=int, default=64, help="at saturation (default: %(default)s)")
    serve.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    serve.add_argument("--json", action="store_true", help="end with one line of JSON")
    serve.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> dict:
    from loadtest.bench_serve import Case, bench_serve

    case = Case(args.size, args.tokens, args.tenants, args.seconds, args.connections, args.dtype)
    figures = bench_serve(case)
    if not args.json:
        print(json.dumps(figures, indent=2))
    return figures
