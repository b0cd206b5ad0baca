"""`hplm build`: turns a checkpoint, corpora and labels into a store, with one command for each step."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.cli.options import CORPUS, TaskNames, device_of, learn_option
from hplm.cli.tables import table_built
from hplm.errors import InvalidInput
from hplm.options import BANK_DTYPES, MIN_TOKENS, TABLE_DTYPES

if TYPE_CHECKING:
    from builder.store.store import Store

ROOT_MINUTES, DOMAIN_MINUTES, STACK_MINUTES = 10.0, 5.0, 10.0  # to adapt the lower layers, or to learn a shorter stack


def register(commands: argparse._SubParsersAction) -> None:
    build = commands.add_parser("build", help="build a backbone, a domain or a tenant")
    steps = build.add_subparsers(dest="step", required=True, metavar="STEP")
    root = _step(steps, "root", run_root, "split a BERT or a decoder, adapt its lower stack to windows, build the root table")
    root.add_argument(
        "--model",
        required=True,
        help="Hugging Face name or folder of a BERT, or of a decoder (gpt2, llama, opt); or a .gguf file of a llama",
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
    domain = _step(steps, "domain", run_domain, "adapt the lower stack to a corpus, build the domain's table")
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
    for step, minutes in ((root, ROOT_MINUTES), (domain, DOMAIN_MINUTES)):
        needed = step is domain
        without = "" if needed else " (a decoder with --lower 0 needs none)"
        step.add_argument("--corpus", type=Path, nargs="+", action="extend", default=[], required=needed, help=CORPUS + without)
        step.add_argument(
            "--keep",
            type=float,
            default=1.0,
            metavar="SHARE",
            help="share of the corpus's different windows to store, the most frequent first; shorter n-grams are stored beside "
            "them (default: %(default)s)",
        )
        step.add_argument(
            "--dtype", choices=TABLE_DTYPES, default="fp16", help="precision of the stored vectors (default: %(default)s)"
        )
        _limits(step, "adapt the lower layers", minutes)
    _goal(root, "the original model's output")
    stack = _step(steps, "stack", run_stack, "train an upper stack of fewer layers to give what the full one gives")
    stack.add_argument("--name", required=True, help="name of the stack")
    stack.add_argument(
        "--layers",
        type=int,
        default=1,
        metavar="N",
        help="number of its layers, fewer than the full upper stack has (default: %(default)s)",
    )
    stack.add_argument("--corpus", type=Path, nargs="+", action="extend", default=[], required=True, help=CORPUS)
    _limits(stack, "train the stack", STACK_MINUTES)
    _goal(stack, "the full upper stack's output")
    tenant = _step(steps, "tenant", run_tenant, "train an adapter and a head on labelled data")
    tenant.add_argument("--id", required=True, help="name of the tenant")
    tenant.add_argument("--domain", help="domain of the tenant (default: that of its version before, or root)")
    tenant.add_argument(
        "--task", choices=TaskNames(), metavar="TASK", help="%(choices)s (default: that of the tenant's version before)"
    )
    tenant.add_argument(
        "--train", type=Path, help="training data, JSONL (docs/training.md); a tenant of a decoder takes the backbone as it is"
    )
    tenant.add_argument("--dev", type=Path, help="dev data, JSONL (default: a tenth of the training data)")
    start = tenant.add_mutually_exclusive_group()
    start.add_argument(
        "--from-version",
        type=int,
        metavar="N",
        help="go on training version N of the tenant (default: the newest, if the training data are new)",
    )
    start.add_argument(
        "--fresh",
        dest="from_version",
        action="store_const",
        const=0,
        help="start anew, from random weights",
    )
    tenant.add_argument(
        "--adapter",
        metavar="KIND",
        help="kind of adapter: bottleneck or lora (default: as in the tenant's version before, or bottleneck)",
    )
    tenant.add_argument(
        "--places",
        type=lambda text: tuple(text.split(",")),
        metavar="PLACE,...",
        help="projections that the adapter changes: query, key, value, attention_out, ffn_in, ffn_out "
        "(default: as in the version before, or attention_out; lora: query,value; with --upper-rate all)",
    )
    tenant.add_argument(
        "--dtype",
        choices=BANK_DTYPES,
        help="precision of the stored adapter and head (default: as in the version before, or fp16)",
    )
    tenant.add_argument(
        "--rank", type=int, help="rank of the adapter; 0: only a head (default: as in the version before, or 32)"
    )
    tenant.add_argument("--epochs", type=int, default=4, help="maximum number of epochs (default: %(default)s)")
    tenant.add_argument(
        "--patience",
        type=int,
        default=3,
        metavar="N",
        help="stop after this many epochs without a better dev score (default: %(default)s)",
    )
    tenant.add_argument(
        "--learning-rate",
        type=float,
        default=2e-3,
        metavar="RATE",
        help="learning rate of adapter and head (default: %(default)s)",
    )
    tenant.add_argument(
        "--upper-rate",
        type=float,
        default=0.0,
        metavar="RATE",
        help="also train the upper layers, at this learning rate, and store their change as a LoRA of rank --rank. Answers get "
        "better, and training takes 1.5 times as long. 1e-4 is a good rate (default: 0, train only adapter and head)",
    )
    tenant.add_argument(
        "--batch-texts",
        type=int,
        default=8,
        metavar="N",
        help="texts in a training step, with 8,192 tokens at most (default: %(default)s)",
    )
    tenant.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the hidden states that each training step leaves out; BERT's is 0.1 (default: %(default)s)",
    )
    tenant.add_argument(
        "--grid",
        action="store_true",
        help="train with half, once and twice the learning rate, each with 8 and with 32 texts a step; keep the best",
    )


def _step(steps: argparse._SubParsersAction, name: str, run: object, text: str) -> argparse.ArgumentParser:
    step = steps.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    step.add_argument("--store", type=Path, required=True, help="folder of the store")
    step.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: %(default)s)")
    step.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    step.add_argument("--json", action="store_true", help="end with one line of JSON")
    step.set_defaults(run=run)
    return step


def _limits(step: argparse.ArgumentParser, what: str, minutes: float) -> None:
    step.add_argument(
        "--minutes", type=float, help=f"most time to {what}; 0: none (default: {minutes:g}, or no limit with --steps)"
    )
    step.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"most steps to {what}: without --minutes, the same number on every machine (default: no limit)",
    )


def _goal(step: argparse.ArgumentParser, output: str) -> None:
    step.add_argument(
        "--until",
        type=float,
        metavar="SHARE",
        help=f"end as soon as this share of the variance of {output} is explained on held-out texts, such as 0.94; --minutes "
        "and --steps remain limits (default: learn until one of these)",
    )


def run_root(args: argparse.Namespace) -> dict:
    from builder.adaptation.learning import Budget
    from builder.tables.root import RootOptions, build_root
    from hplm.model.windows import TRIGRAMS, Window

    usual = 1 if args.lower == 0 else TRIGRAMS.n
    window = Window(usual if args.window is None else args.window, args.causal)
    options = RootOptions(args.name, args.lower, args.upper, window, args.keep, args.dtype, args.seed, args.masked)
    budget = Budget(_minutes(args, ROOT_MINUTES), args.steps, args.until)
    store, table = build_root(args.model, args.corpus, args.store, options, budget, device_of(args))
    return table_built(args, table, f"root of backbone {store.config.name}")


def run_domain(args: argparse.Namespace) -> dict:
    from builder.adaptation.learning import Budget
    from builder.store.store import Store
    from builder.tables.domain import DomainOptions, build_domain

    options = DomainOptions(args.parent, args.keep, args.dtype, args.seed, args.learn, args.min_tokens)
    budget = Budget(_minutes(args, DOMAIN_MINUTES), args.steps)
    table = build_domain(Store(args.store), args.name, args.corpus, options, budget, device_of(args))
    return table_built(args, table, f"domain {args.name}")


def run_stack(args: argparse.Namespace) -> dict:
    from builder.adaptation.learning import Budget
    from builder.store.store import Store
    from builder.tables.stack import StackOptions, build_stack

    store, options = Store(args.store), StackOptions(args.layers, args.seed)
    budget = Budget(_minutes(args, STACK_MINUTES), args.steps, args.until)
    report = build_stack(store, args.name, args.corpus, options, budget, device_of(args))
    full, layers = store.config.upper_layers, report["layers"]
    if not args.json:
        print(
            f"stack {args.name}: {layers} of {full} layers; they explain {report['at_end']:.3f} of the variance of the full "
            f"stack's output on held-out texts, before learning {report['at_start']:.3f}"
        )
        print(f"how it was trained: {store.stack_file(args.name, '.json')}")
    kept = ("started_from", "at_start", "at_end", "steps", "seconds")
    return {"stack": args.name, "layers": layers, "full": full, **{name: report[name] for name in kept}}


def _minutes(args: argparse.Namespace, default: float) -> float | None:
    """Returns the limit of time; None if only the steps are limited."""
    return args.minutes if args.minutes is not None or args.steps is not None else default


def run_tenant(args: argparse.Namespace) -> dict:
    from builder.store.store import Store
    from builder.training.tenant import build_tenant, warnings_of
    from hplm.tasks import check_backbone

    store = Store(args.store)
    if args.task is not None:
        check_backbone(args.task, store.config)
    if store.config.is_decoder:
        return _plain_tenant(args, store)
    if args.train is None:
        raise InvalidInput("a tenant learns from labelled data: give --train FILE")
    form = {name: getattr(args, name) for name in ("adapter", "places", "rank", "dtype")}
    tenant = build_tenant(
        store,
        args.id,
        args.domain,
        args.task,
        args.train,
        args.dev,
        grid=args.grid,
        from_version=args.from_version,
        device=device_of(args),
        **{name: value for name, value in form.items() if value is not None},
        epochs=args.epochs,
        patience=args.patience,
        learning_rate=args.learning_rate,
        body_rate=args.upper_rate,
        batch_texts=args.batch_texts,
        dropout=args.dropout,
        seed=args.seed,
    )
    report = store.report(tenant)
    dev = report["dev"]
    if not args.json:
        for warning in warnings_of(report):
            print(warning)
        metric = dev["metric"]
        before = f"; version {report['from_version']} had {report['at_start']['dev']:.3f}" if "at_start" in report else ""
        print(f"tenant {tenant.id} version {tenant.version}: {metric} {dev[metric]:.3f} on {dev['texts']} dev texts{before}")
        print(f"how it was trained: {store.tenant_folder(tenant.id, tenant.version)}/report.json, training.png")
    made = {"tenant": tenant.id, "version": tenant.version, "from_version": report["from_version"]}
    return {**made, "task": tenant.task, "labels": tenant.labels, "dev": dev}


def _plain_tenant(args: argparse.Namespace, store: Store) -> dict:
    from builder.importing.generative import plain_tenant

    if args.train is not None:
        raise InvalidInput("tenants of a decoder do not learn here yet: leave --train out, or import a LoRA that peft trained")
    tenant = plain_tenant(store, args.id, args.domain or "root")
    if not args.json:
        print(f"tenant {tenant.id} version {tenant.version}: {tenant.task}, as backbone {store.config.name} does")
    return {"tenant": tenant.id, "version": tenant.version, "task": tenant.task}
