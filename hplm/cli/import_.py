"""`hplm import`: makes tenants in a store from adapters that `peft` or AdapterHub's `adapters` saved, and from checkpoints that
were fine-tuned in full."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.cli.options import CORPUS, TaskNames, device_of, refuse_given
from hplm.errors import InvalidInput
from hplm.options import MIN_TOKENS, TABLE_DTYPES

if TYPE_CHECKING:
    from builder.importing.folders import Imported, Importer
    from builder.importing.matching import MatchingOptions
    from builder.store.store import Store, TenantFile

MATCHING = ("rank", "epochs", "learning_rate", "most_texts", "least", "anyway", "seed")
ONE_FOLDER = ("id", "labels", "task", "test", "as_domain")


def register(commands: argparse._SubParsersAction) -> None:
    text = "make tenants from saved adapters, or from checkpoints that were fine-tuned in full"
    command = commands.add_parser("import", help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--store", type=Path, required=True, help="folder of the store")
    command.add_argument(
        "--from",
        dest="folders",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        metavar="FOLDER",
        help="folders that peft, adapters or transformers saved, or a folder with such folders in it",
    )
    command.add_argument(
        "--id", help="name of the tenant (default: the folder's); if it exists, this becomes its next version. For one folder"
    )
    command.add_argument("--domain", default="root", help="domain of the tenants (default: %(default)s)")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    one = command.add_argument_group("for one folder")
    one.add_argument(
        "--labels",
        type=lambda text: text.split(","),
        metavar="A,B,...",
        help="the labels, in the order of their ids (default: from the files)",
    )
    one.add_argument("--task", choices=TaskNames(), metavar="TASK", help="what it was trained for (default: from the files)")
    one.add_argument("--test", type=Path, metavar="FILE", help="labelled JSONL to score the tenant on, as it will be served")
    whole = command.add_argument_group("for checkpoints")
    whole.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="texts like those the tenants get: one a line, or JSONL as for training, without labels; a file texts.jsonl in a "
        "checkpoint's folder is used instead",
    )
    whole.add_argument("--plan", action="store_true", help="only read and check the folders; print which fit, and their sizes")
    whole.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="N folders at a time, each with one thread (default: 1)"
    )
    whole.add_argument("--rank", type=int, default=32, help="rank of the LoRA (default: %(default)s)")
    whole.add_argument("--epochs", type=int, default=1, help="passes over the texts (default: %(default)s)")
    whole.add_argument("--learning-rate", type=float, default=1e-3, metavar="RATE", help="learning rate (default: %(default)s)")
    whole.add_argument("--most-texts", type=int, default=3000, metavar="N", help="most texts to take (default: %(default)s)")
    whole.add_argument(
        "--least",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="do not store a tenant if a smaller share of its answers are the checkpoint's (default: %(default)s)",
    )
    whole.add_argument("--anyway", action="store_true", help="store a tenant also below --least")
    whole.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: %(default)s)")
    whole.add_argument(
        "--root",
        metavar="MODEL",
        help="if the store has no root, build it from this model; its corpus is the field text of --texts",
    )
    command.add_argument(
        "--repository",
        type=Path,
        metavar="FOLDER",
        help="then export the store to this folder",
    )
    lower = command.add_argument_group("for a LoRA that changes lower layers")
    lower.add_argument(
        "--as-domain", metavar="NAME", help="merge these changes into a new domain below --domain, with a table of --corpus"
    )
    lower.add_argument("--corpus", type=Path, nargs="+", action="extend", help=CORPUS)
    lower.add_argument(
        "--keep",
        type=float,
        metavar="SHARE",
        help="share of the different windows to store, as for `hplm build domain`, also by default",
    )
    lower.add_argument(
        "--dtype", choices=TABLE_DTYPES, default="fp16", help="precision of the stored vectors (default: %(default)s)"
    )
    lower.add_argument(
        "--min-tokens",
        type=int,
        default=MIN_TOKENS,
        metavar="N",
        help="refuse a corpus of fewer tokens (default: %(default)s)",
    )
    command.set_defaults(run=run, default_of=command.get_default)


def run(args: argparse.Namespace) -> dict:
    if bool(args.as_domain) != bool(args.corpus):
        raise InvalidInput("--as-domain NAME and --corpus FILE... need each other: give both or neither")
    if not args.as_domain:
        refuse_given(args, ("keep", "dtype", "min_tokens"), "works only with --as-domain, which builds a table: leave it out")
    from builder.importing.checkpoint import is_checkpoint
    from builder.importing.folders import Importer, named
    from builder.importing.lower import NewDomain
    from builder.importing.matching import MatchingOptions
    from builder.importing.tenant import ImportOptions
    from builder.store.store import Store

    folders = named(args.folders)
    if not any(is_checkpoint(folder) for _, folder in folders):
        refuse_given(args, ("texts", *MATCHING), "works for checkpoints of whole models, and none is given: leave it out")
    if len(folders) > 1:
        refuse_given(args, ONE_FOLDER, f"works for one folder, and {len(folders)} are given: leave it out")
    if args.at_once < 1:
        raise InvalidInput(f"--at-once {args.at_once}: give 1 or more")
    matching = MatchingOptions(**{name: getattr(args, name) for name in MATCHING})
    if args.plan:
        return _plan(args, folders, matching)
    if not (args.store / "plot/root/1").exists() and args.root is not None:
        if args.texts is None:
            raise InvalidInput("--root needs --texts, from which the root's lower layers learn too: give both")
        _other(args, "build", "root", "--model", args.root, "--corpus", args.texts, "--seed", args.seed)
    new = NewDomain(args.as_domain, args.corpus, args.keep, args.dtype, args.min_tokens) if args.as_domain else None
    options = ImportOptions(args.domain, args.labels, args.task, new, args.test)
    store = Store(args.store)
    if args.root not in (None, store.model):
        raise InvalidInput(f"--root {args.root}: the store {args.store} was made from {store.model}: name another --store")
    importer = Importer(store, options, matching, args.texts, device_of(args))
    result = _one(args, importer, *folders[0]) if len(folders) == 1 else _many(args, store, importer, folders)
    if args.repository is not None:
        _other(args, "export", "--repository", args.repository)
    return result


def _other(args: argparse.Namespace, *words: object) -> None:
    """Runs another command on the same store and device."""
    from hplm.cli.main import parser

    other = parser().parse_args([*map(str, words), "--store", str(args.store), "--device", args.device])
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        other.run(other)


def _one(args: argparse.Namespace, importer: Importer, tenant_id: str, folder: Path) -> dict[str, Any]:
    tenant, report = importer.one(args.id or tenant_id, folder, is_named=args.id is not None)
    if not args.json:
        _print(tenant, report)
    named = {"tenant": tenant.id, "version": tenant.version, "domain": tenant.domain, "domain_version": tenant.domain_version}
    adapter = {"adapter": tenant.adapter if tenant.rank else None, "rank": tenant.rank, "labels": tenant.labels}
    return {**named, **adapter, **report}


def _plan(args: argparse.Namespace, folders: list[tuple[str, Path]], matching: MatchingOptions) -> dict[str, Any]:
    """Says what would become of each folder. Exits with 1 if one of them would be refused."""
    from builder.importing.folders import planned
    from builder.store.store import Store
    from hplm.model.checkpoint import load_checkpoint

    took: list[float] = []
    if args.root is not None and not (args.store / "store.json").exists():
        model, config = args.root, load_checkpoint(args.root).config
    else:
        store = Store(args.store)
        model, config = store.model, store.config
        took = [report["took"] for report in map(store.report, store.tenants()) if "took" in report]
    found = []
    for one in planned(model, config, folders, matching):
        found.append(one)
        fits = f"{one.task}, {one.labels} labels, changed by {one.distance:.3f}" if one.task else "an adapter"
        print(f"{one.id}: {one.refused or fits}", file=sys.stderr, flush=True)
    kept = [one for one in found if one.task]
    refused = {one.id: one.refused for one in found if one.refused}
    before, after = (sum(getattr(one, f"bytes_{side}") for one in kept) for side in ("before", "after"))
    args.status = int(bool(refused))
    if not args.json:
        each = f"{sum(took) / len(took):.0f} s each, as earlier ones here" if took else "the first one will tell its time"
        print(
            f"checkpoints that fit: {len(kept)}; folders that do not: {len(refused)}; {before / 1e6:,.1f} MB become "
            f"{after / 1e6:,.1f} MB; {each}"
        )
    return {
        "fit": {one.id: {"task": one.task, "distance": one.distance, "bytes": one.bytes_after} for one in kept},
        "refused": refused,
        "bytes": {"before": before, "after": after},
        "seconds_each": round(sum(took) / len(took), 1) if took else None,
    }


def _many(args: argparse.Namespace, store: Store, importer: Importer, folders: list[tuple[str, Path]]) -> dict[str, Any]:
    """Imports all folders. Exits with 1 if one of them was refused."""
    from builder.importing.folders import write_page

    found = []
    try:
        for number, one in enumerate(importer.all(folders, at_once=args.at_once), start=1):
            found.append(one)
            print(f"{number} of {len(folders)}: {_line(one)}", file=sys.stderr, flush=True)
    finally:
        page = write_page(store, found)
    refused = [one for one in found if one.tenant is None]
    args.status = int(bool(refused))
    if not args.json:
        print(f"tenants imported: {len(found) - len(refused)}; folders refused: {len(refused)}; {page}")
    return {
        "imported": {one.id: {"version": one.tenant.version, "agreement": one.agreement} for one in found if one.tenant},
        "refused": {one.id: {"why": one.refused, "agreement": one.agreement} for one in refused},
        "page": str(page),
    }


def _line(one: Imported) -> str:
    if one.tenant is None:
        return f"{one.id} refused: {one.refused}"
    answers = f", {one.agreement:.1%} of the answers are the checkpoint's" if one.agreement is not None else ""
    return f"tenant {one.id} version {one.tenant.version}{answers}"


def _print(tenant: TenantFile, report: dict) -> None:
    came = report["imported"]
    without = "only a head" if tenant.has_head else "no adapter"
    adapter = f"{tenant.adapter} of rank {tenant.rank}" if tenant.rank else without
    heads = f"{len(tenant.labels)} labels" if tenant.has_head else tenant.task
    print(f"tenant {tenant.id} version {tenant.version}: {adapter}, {heads}, from {came['library']}")
    if "after" in report:
        _print_match(report)
    else:
        print(
            f"the adapter was trained on {came['trained_on']}, the store was made from {came['store_made_from']}; "
            f"{report['note']}"
        )
    if "merged" in report:
        merged = report["merged"]
        layers = ", ".join(map(str, merged["layers"]))
        print(f"domain {merged['domain']}, lower layers {layers} merged: {merged['ngrams']:,} n-grams, {merged['mb']:,.1f} MB")
    for where, scores in report.get("test", {}).items():
        told = (f"{name} {value:.3f}" for name, value in scores.items() if isinstance(value, float))
        print(f"{where}: {', '.join(told)}, over {scores['rows']:,} rows")


def _print_match(report: dict) -> None:
    after, size, texts = report["after"], report["bytes"], report["texts"]
    sure = f"; {after['where_sure']:.1%} where it is sure" if after.get("where_sure") is not None else ""
    print(
        f"{after['agreement']:.1%} of {after['answers']:,} answers are the checkpoint's{sure}. Before it learned from "
        f"{texts['learned']:,} texts: {report['before']:.1%}"
    )
    print(f"{size['tenant'] / 1e6:.2f} MB instead of {size['checkpoint'] / 1e6:,.1f} MB; {report['note']}")
