"""`hplm import`: makes a tenant in a store from an adapter that `peft` or AdapterHub's `adapters` saved."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.cli.options import CORPUS, TaskNames, device_of, refuse_given
from hplm.errors import InvalidInput
from hplm.options import MIN_TOKENS, TABLE_DTYPES

if TYPE_CHECKING:
    from builder.store.store import TenantFile


def register(commands: argparse._SubParsersAction) -> None:
    text = "make a tenant from an adapter that peft or AdapterHub's adapters saved"
    command = commands.add_parser("import", help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--store", type=Path, required=True, help="folder of the store")
    command.add_argument("--id", required=True, help="name of the tenant; if it exists, this becomes its next version")
    command.add_argument(
        "--from", dest="folder", type=Path, required=True, help="folder with adapter_config.json, weights and head"
    )
    command.add_argument("--domain", default="root", help="domain of the tenant (default: %(default)s)")
    command.add_argument(
        "--labels",
        type=lambda text: text.split(","),
        metavar="A,B,...",
        help="the labels, in the order of their ids (default: from the files)",
    )
    command.add_argument(
        "--task", choices=TaskNames(), metavar="TASK", help="task that the adapter was trained for (default: from the files)"
    )
    command.add_argument("--test", type=Path, metavar="FILE", help="JSONL to score the tenant on, as it will be served")
    command.add_argument(
        "--as-domain",
        metavar="NAME",
        help="merge a LoRA's changes of the lower layers into a new domain below --domain, with a table of --corpus",
    )
    command.add_argument("--corpus", type=Path, nargs="+", action="extend", help=f"for --as-domain: {CORPUS}")
    command.add_argument(
        "--keep",
        type=float,
        metavar="SHARE",
        help="for --as-domain: share of the different windows to store, as for `hplm build domain`, also by default",
    )
    command.add_argument(
        "--dtype",
        choices=TABLE_DTYPES,
        default="fp16",
        help="for --as-domain: precision of the stored vectors (default: %(default)s)",
    )
    command.add_argument(
        "--min-tokens",
        type=int,
        default=MIN_TOKENS,
        metavar="N",
        help="for --as-domain: refuse a corpus of fewer tokens (default: %(default)s)",
    )
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.set_defaults(run=run, default_of=command.get_default)


def run(args: argparse.Namespace) -> dict:
    if bool(args.as_domain) != bool(args.corpus):
        raise InvalidInput("--as-domain NAME and --corpus FILE... need each other: give both or neither")
    if not args.as_domain:
        refuse_given(args, ("keep", "dtype", "min_tokens"), "works only with --as-domain, which builds a table: leave it out")
    from builder.importing.lower import NewDomain
    from builder.importing.tenant import ImportOptions, import_tenant
    from builder.store.store import Store

    new = NewDomain(args.as_domain, args.corpus, args.keep, args.dtype, args.min_tokens) if args.as_domain else None
    options = ImportOptions(args.domain, args.labels, args.task, new, args.test)
    tenant, report = import_tenant(Store(args.store), args.id, args.folder, options, device_of(args))
    if not args.json:
        _print(tenant, report)
    named = {"tenant": tenant.id, "version": tenant.version, "domain": tenant.domain, "domain_version": tenant.domain_version}
    adapter = {"adapter": tenant.adapter if tenant.rank else None, "rank": tenant.rank, "labels": tenant.labels}
    return {**named, **adapter, **report}


def _print(tenant: TenantFile, report: dict) -> None:
    came = report["imported"]
    without = "only a head" if tenant.has_head else "no adapter"
    adapter = f"{tenant.adapter} of rank {tenant.rank}" if tenant.rank else without
    heads = f"{len(tenant.labels)} labels" if tenant.has_head else tenant.task
    print(f"tenant {tenant.id} version {tenant.version}: {adapter}, {heads}, from {came['library']}")
    print(
        f"the adapter was trained on {came['trained_on']}, the store was made from {came['store_made_from']}; {report['note']}"
    )
    if "merged" in report:
        merged = report["merged"]
        layers = ", ".join(map(str, merged["layers"]))
        print(f"domain {merged['domain']}, lower layers {layers} merged: {merged['ngrams']:,} n-grams, {merged['mb']:,.1f} MB")
    for where, scores in report.get("test", {}).items():
        told = (f"{name} {value:.3f}" for name, value in scores.items() if isinstance(value, float))
        print(f"{where}: {', '.join(told)}, over {scores['rows']:,} rows")
