"""`hplm build`: turns a checkpoint, corpora and labels into a store, with one command for each step."""

from __future__ import annotations

import argparse
from pathlib import Path

from hplm.cli import build_tenant
from hplm.cli.options import CORPUS, build_step, device_of, learn_option
from hplm.cli.tables import table_built
from hplm.options import MIN_TOKENS, TABLE_DTYPES

ROOT_MINUTES, DOMAIN_MINUTES = 10.0, 5.0  # to adapt the lower layers


def register(commands: argparse._SubParsersAction) -> None:
    build = commands.add_parser("build", help="build a backbone, a domain or a tenant")
    steps = build.add_subparsers(dest="step", required=True, metavar="STEP")
    _root(steps)
    _domain(steps)
    build_tenant.register(steps)


def _root(steps: argparse._SubParsersAction) -> None:
    root = build_step(
        steps, "root", run_root, "split an encoder or a decoder, adapt its lower stack to windows, build the root table"
    )
    root.add_argument(
        "--model",
        required=True,
        help="Hugging Face name or folder of a BERT or a relative of it (docs/training.md#models), or of a decoder (gpt2, "
        "llama, opt); or a .gguf file of a llama",
    )
    root.add_argument("--name", help="name of the backbone (default: the model's)")
    root.add_argument(
        "--lower", type=int, help="number of lower layers (default: half); 0, of a decoder: the table holds its words"
    )
    root.add_argument("--upper", type=int, help="number of upper layers (default: the rest)")
    root.add_argument("--window", type=int, help="tokens in a window (default: 3, or 1 with --lower 0)")
    root.add_argument(
        "--causal",
        action="store_true",
        help="a window is a token and those before it, always so of a decoder (default: a token and those around it)",
    )
    root.add_argument(
        "--masked",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="last share of --minutes, in which the lower layers learn to predict masked words of the corpus; domains "
        "continue with the same prediction head (default: %(default)s)",
    )
    _table(root, ROOT_MINUTES, " (a decoder with --lower 0 needs none)")
    root.add_argument(
        "--until",
        type=float,
        metavar="SHARE",
        help="end as soon as this share of the variance of the original model's output is explained on held-out texts, such as "
        "0.94; --minutes and --steps remain limits (default: learn until one of these)",
    )


def _domain(steps: argparse._SubParsersAction) -> None:
    domain = build_step(steps, "domain", run_domain, "adapt the lower stack to a corpus, build the domain's table")
    domain.add_argument("--name", required=True, help="name of the domain")
    domain.add_argument("--parent", default="root", help="domain that this one falls back to (default: %(default)s)")
    domain.add_argument(
        "--min-tokens",
        type=int,
        default=MIN_TOKENS,
        metavar="N",
        help="refuse a corpus of fewer tokens: look-ups would rarely hit its table (default: %(default)s)",
    )
    learn_option(domain)
    _table(domain, DOMAIN_MINUTES)


def _table(step: argparse.ArgumentParser, minutes: float, without: str = "") -> None:
    """Adds the options of the steps that build a table. `without`: when no corpus is needed."""
    step.add_argument(
        "--corpus", type=Path, nargs="+", action="extend", default=[], required=not without, help=CORPUS + without
    )
    step.add_argument(
        "--keep",
        type=float,
        metavar="SHARE",
        help="share of the corpus's different windows to store, the most frequent first; shorter n-grams are stored beside "
        "them (default: 1, or less for a table of a million n-grams)",
    )
    step.add_argument(
        "--dtype", choices=TABLE_DTYPES, default="fp16", help="precision of the stored vectors (default: %(default)s)"
    )
    step.add_argument(
        "--minutes",
        type=float,
        help=f"most time to adapt the lower layers; 0: none (default: {minutes:g}, or no limit with --steps)",
    )
    step.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="most steps to adapt the lower layers: without --minutes, the same number on every machine (default: no limit)",
    )


def run_root(args: argparse.Namespace) -> dict:
    from builder.learning.limits import Budget
    from builder.tables.root import RootOptions, build_root
    from hplm.model.windows import TRIGRAMS, Window

    usual = 1 if args.lower == 0 else TRIGRAMS.n
    window = Window(usual if args.window is None else args.window, args.causal)
    options = RootOptions(args.name, args.lower, args.upper, window, args.keep, args.dtype, args.seed, args.masked)
    budget = Budget(_minutes(args, ROOT_MINUTES), args.steps, args.until)
    store, table = build_root(args.model, args.corpus, args.store, options, budget, device_of(args))
    return table_built(args, table, f"root of backbone {store.config.name}")


def run_domain(args: argparse.Namespace) -> dict:
    from builder.learning.limits import Budget
    from builder.store.store import Store
    from builder.tables.domain import DomainOptions, build_domain

    options = DomainOptions(args.parent, args.keep, args.dtype, args.seed, args.learn, args.min_tokens)
    budget = Budget(_minutes(args, DOMAIN_MINUTES), args.steps)
    table = build_domain(Store(args.store), args.name, args.corpus, options, budget, device_of(args))
    return table_built(args, table, f"domain {args.name}")


def _minutes(args: argparse.Namespace, default: float) -> float | None:
    """Returns the limit of time; None if only the steps are limited."""
    return args.minutes if args.minutes is not None or args.steps is not None else default
