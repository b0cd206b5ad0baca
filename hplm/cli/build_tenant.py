"""`hplm build tenant`: trains an adapter and a head on labelled data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.cli.options import TaskNames, build_step, device_of, refuse_given
from hplm.cli.tenant_exits import make_exits
from hplm.errors import InvalidInput
from hplm.options import BANK_DTYPES

if TYPE_CHECKING:
    from builder.store.store import Store

TRAINING = (
    *("train", "dev", "from_version", "fresh", "adapter", "places", "dtype", "rank", "epochs", "patience", "learning_rate"),
    *("upper_rate", "batch_texts", "grid", "teacher", "exits"),
)


def register(steps: argparse._SubParsersAction) -> None:
    tenant = build_step(steps, "tenant", run, "train an adapter and a head on labelled data")
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
        action="store_true",
        help="start anew, from random weights",
    )
    tenant.add_argument(
        "--exits", type=Path, metavar="TEXTS",
        help="then make its exits by these texts, which need no labels; `hplm tenant exits` has more options",
    )  # fmt: skip
    _form_options(tenant)
    _training_options(tenant)
    tenant.set_defaults(default_of=tenant.get_default)


def _form_options(tenant: argparse.ArgumentParser) -> None:
    """Adds the options of the stored adapter and head."""
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


def _training_options(tenant: argparse.ArgumentParser) -> None:
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
        "--teacher",
        choices=("dedicated",),
        help="first fine-tune the original model in full on the same data; the tenant then learns labels and its soft answers",
    )
    tenant.add_argument(
        "--grid",
        action="store_true",
        help="train with half, once and twice the learning rate, each with 8 and with 32 texts a step; keep the best",
    )


def run(args: argparse.Namespace) -> dict:
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
    if args.exits is not None:
        from builder.exits.build import check_task
        from builder.tables.text_files import check_file

        known = store.tenant(args.id)
        check_task(args.id, args.task or (known.task if known is not None else None))  # and not after the training
        check_file(args.exits)
    form = {name: getattr(args, name) for name in ("adapter", "places", "rank", "dtype")}
    tenant = build_tenant(
        store,
        args.id,
        args.domain,
        args.task,
        args.train,
        args.dev,
        grid=args.grid,
        teacher=args.teacher,
        from_version=0 if args.fresh else args.from_version,
        device=device_of(args),
        **{name: value for name, value in form.items() if value is not None},
        epochs=args.epochs,
        patience=args.patience,
        learning_rate=args.learning_rate,
        body_rate=args.upper_rate,
        batch_texts=args.batch_texts,
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
        print(f"how it was trained: {store.tenant_folder(tenant.id, tenant.version)}/report.html")
    made = {"tenant": tenant.id, "version": tenant.version, "from_version": report["from_version"]}
    made |= {"task": tenant.task, "labels": tenant.labels, "dev": dev}
    return made | ({"exits": make_exits(args, store, tenant.id, args.exits)} if args.exits is not None else {})


def _plain_tenant(args: argparse.Namespace, store: Store) -> dict:
    from builder.importing.generative import plain_tenant

    refuse_given(args, TRAINING, "tenants of a decoder do not learn here yet: leave it out, or import a LoRA that peft trained")
    tenant = plain_tenant(store, args.id, args.domain)
    if not args.json:
        how = f"with its {tenant.adapter}" if tenant.rank else f"as backbone {store.config.name} does"
        print(f"tenant {tenant.id} version {tenant.version}: {tenant.task} on {tenant.domain}, {how}")
    return {"tenant": tenant.id, "version": tenant.version, "task": tenant.task}
