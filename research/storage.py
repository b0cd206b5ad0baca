"""Measures a domain's table: its bytes, its coverage and the accuracy on it, for several sizes, in 16 and in 8 bits.

    python -m research.storage [--domains stdlib,web]

Takes the corpora, counts and lower stacks of a finished demo. Stores the tables in each size, trains the tenants on each, and
scores them on their test data. An interrupted run continues where it stopped; --fresh starts again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from builder.evaluation.tenant import evaluate_tenant
from builder.publish.export import copy_file
from builder.store.store import Store
from builder.tables.domain import recut_domain
from builder.training.tasks import training_task
from builder.training.tenant import build_tenant
from demo.data import DemoTenant, data_of
from demo.plan import EPOCHS
from hplm.engine.engine import resolve_device
from hplm.errors import HplmError, InvalidInput
from hplm.plot.levels import Tally

KEEPS = (1.0, 0.004, 0.001, 0.0)
COMPARED = ("fp16", "int8")
WHOLE = ("domain", "root")


@dataclass(frozen=True)
class Row:
    domain: str
    keep: float
    dtype: str
    ngrams: int
    mb: float
    found: dict[str, float]  # share of the windows of the tenants' test texts, by level
    accuracy: dict[str, float]  # of each tenant, trained on this table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m research.storage", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".hplm/demo"), help="folder of the demo (default: %(default)s)")
    parser.add_argument("--domains", default="stdlib,web", help="domains, separated by commas (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="delete the measurements of earlier runs")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    try:
        folder = finished_demo(args.folder)
        if args.fresh:
            shutil.rmtree(folder / "storage", ignore_errors=True)
        rows = list(measure(folder, args.domains.split(",")))
    except HplmError as error:
        print(f"storage: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


def measure(folder: Path, domains: list[str]) -> Iterator[Row]:
    demo = Store(folder / "store")
    store = _sibling(demo, folder / "storage")
    tenants = data_of(folder / "data").tenants
    for domain in domains:
        mine = [tenant for tenant in tenants if tenant.domain == domain]
        if not mine:
            raise InvalidInput(f"the demo has no domain {domain!r}: it has {', '.join(sorted({t.domain for t in tenants}))}")
        for dtype in COMPARED:
            for keep in KEEPS:
                if keep:
                    name = f"{domain}-{dtype}-{keep:g}"
                    built = recut_domain(demo, domain, store, name, keep, dtype, resolve_device("auto"))
                else:  # only the root
                    name, built = "root", None
                yield Row(
                    domain=domain,
                    keep=keep,
                    dtype=dtype,
                    ngrams=built.meta.keys if built else 0,
                    mb=sum(built.meta.sizes().values()) / 1e6 if built else 0.0,
                    found=_found(store, name, mine),
                    accuracy={tenant.id: _accuracy(store, name, tenant) for tenant in mine},
                )


def table(rows: list[Row]) -> str:
    titles = ("domain", "keep", "dtype", "n-grams", "MB", "whole: domain", "whole: root", "2-gram", "1-gram", "accuracy")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        found = " | ".join(f"{100 * row.found.get(level, 0):.1f} %" for level in (*WHOLE, "2-gram", "1-gram"))
        accuracy = ", ".join(f"{value:.3f}" for value in row.accuracy.values())
        lines.append(f"| {row.domain} | {row.keep:.1%} | {row.dtype} | {row.ngrams:,} | {row.mb:,.1f} | {found} | {accuracy} |")
    return "\n".join(lines)


def finished_demo(folder: Path) -> Path:
    found = sorted(folder.glob("*/store/store.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InvalidInput(f"{folder} contains no finished demo: run `./run demo` first")
    return found[-1].parent.parent


def _sibling(demo: Store, folder: Path) -> Store:
    """Returns a store with the demo's root, for other branches and tenants."""
    if not (folder / "store.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
        parts = ("backbone.json", "tokenizer.json", "upper.safetensors", "lower/root-1.*", "plot/root/1/*", "store.json")
        for file in (file for part in parts for file in sorted(demo.folder.glob(part))):
            copy_file(file, folder / file.relative_to(demo.folder))
    return Store(folder)


def _found(store: Store, name: str, tenants: list[DemoTenant]) -> dict[str, float]:
    tokenizer, chain, tally = store.tokenizer(), store.forest(name, 1).chain(name, 1), Tally()
    for tenant in tenants:
        for example in training_task(tenant.task).read(tenant.test).examples:
            tokens = tokenizer.encode(example.text, example.pair, truncate=True).tokens
            tally.add(name, chain, chain.lookup(tokens, np.array([len(tokens)])))
    counts = {level: count for (_, level), count in tally.take().items()}
    return {level: round(count / sum(counts.values()), 4) for level, count in counts.items()}


def _accuracy(store: Store, name: str, tenant: DemoTenant) -> float:
    own = f"{tenant.id}.{name}"
    if all(known.id != own for known in store.tenants()):
        build_tenant(store, own, name, tenant.task, tenant.train, tenant.dev, epochs=EPOCHS)
    return evaluate_tenant(store, own, tenant.test).scores.values["accuracy"]


if __name__ == "__main__":
    sys.exit(main())
