"""Builds the demo's store part by part. A part that is there is not built again, and an interrupted one goes on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from builder.adaptation.learning import Budget
from builder.store.store import Store
from builder.tables.domain import DomainOptions, build_domain
from builder.tables.root import RootOptions, build_root
from builder.training.tenant import build_tenant
from demo.data import MANIFEST, DemoDomain, DemoTenant
from demo.plan import EPOCHS, Size, Sources

BACKBONE = "minilm"


def done_parts(folder: Path, sources: Sequence[Sources]) -> set[str]:
    """Returns the names of the plan's parts that an earlier run has finished."""
    done = {"data"} if (folder / "data" / MANIFEST).exists() else set()
    if not (folder / "store" / "store.json").exists():
        return done
    store = Store(folder / "store")
    done |= {"root"} if store.table_folder("root", 1).exists() else set()
    for one in sources:
        tenants = [store.tenant_folder(tenant, 1) for tenant in one.tenants]
        done |= {one.domain} if all(part.exists() for part in (store.table_folder(one.domain, 1), *tenants)) else set()
    return done


def build_demo_root(folder: Path, model: str, corpora: list[Path], size: Size, device: torch.device) -> Store:
    """Builds the root: one table for all domains."""
    if not (folder / "plot/root/1").exists():
        say(f"root: adapting the lower half of {Path(model).name} to three-token windows, {size.minutes:g} minutes")
        options = RootOptions(name=BACKBONE, keep=size.root_keep)
        build_root(model, corpora, folder, options, Budget(minutes=size.minutes), device)
    return Store(folder)


def build_demo_domain(
    store: Store, domain: DemoDomain, tenants: Sequence[DemoTenant], size: Size, device: torch.device
) -> None:
    """Builds a domain and its tenants."""
    if not store.table_folder(domain.name, 1).exists():
        say(f"domain {domain.name}: {domain.documents} documents of {', '.join(domain.packages[:6])} ...")
        # Guessing words needs longer than the demo has, and MiniLM comes without a head that could.
        options = DomainOptions(keep=size.domain_keep, learn="distil")
        build_domain(store, domain.name, [domain.corpus], options, Budget(minutes=size.domain_minutes), device)
    for one in tenants:
        if not store.tenant_folder(one.id, 1).exists():
            say(f"tenant {one.id}: {one.question}")
            build_tenant(store, one.id, one.domain, one.task, one.train, one.dev, epochs=EPOCHS, device=device)


def say(text: str) -> None:
    print(f"\n== {text}", file=sys.stderr, flush=True)
