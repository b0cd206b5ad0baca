"""Exports and serves each scheme with any number of tenants, for a comparison.

The tenants of a scheme are copies of one tenant. Their adapters and heads are pieces of one random pool. Their whole models are
one file, which is read again for each of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.server import LABELS, Used, multiply, tenant_id
from builder.publish.export import copy_file
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from hplm.adapters.bank import Bank
from hplm.engine.backbone import Backbone
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.server import TritonServer
from hplm.tenants.snapshot import Snapshot
from research.baselines.models import WholeConfig
from research.comparison.swapper import LOADS_AT_ONCE, Swapper
from research.schemes.export import SCHEMES, WHOLE, export_scheme
from testing.random_store import SIZES, random_store, random_tenants

# The compared schemes. DISK is HMI's form of dedicated models once more, but memory keeps only the models in slots.
DISK = "dedicated_inprocess_disk"
COMPARED = (*SCHEMES[: SCHEMES.index("compressed")], DISK, "compressed")
MB = 1e6
DEVICE_MB = 16_000.0  # the device of HMI's Table 2, which counts how many models fit


@dataclass(frozen=True)
class Setup:
    size: str | BackboneConfig = "bert-base"
    tenants: int = 1000
    budget: int = 20
    batch_tokens: int = 1024
    dtype: str = "auto"
    rank: int = 32

    @property
    def config(self) -> BackboneConfig:
        return self.size if isinstance(self.size, BackboneConfig) else SIZES[self.size]


@dataclass(frozen=True)
class ExportedScheme:
    scheme: str
    repository: Path
    setup: Setup

    @property
    def name(self) -> str:
        return self.setup.config.name

    def model(self, tenant: int) -> str:
        return f"{self.name}-{tenant_id(tenant)}" if self.scheme == "dedicated" else self.name


def export_compared(work: Path, scheme: str, setup: Setup) -> ExportedScheme:
    """Exports a scheme into `work`. The store there is made once, the repository each time."""
    store = _store(work, setup)
    repository = work / scheme
    shutil.rmtree(repository, ignore_errors=True)
    options = ServingOptions(dtype=setup.dtype, batch_tokens=max(setup.batch_tokens, setup.config.positions))
    of = "dedicated_inprocess" if scheme == DISK else scheme
    if of not in SCHEMES:
        raise InvalidInput(f"scheme {scheme!r} is not compared: choose {', '.join(COMPARED)}")
    export_scheme(store, repository, options, of, setup.budget)
    exported = ExportedScheme(scheme, repository, setup)
    if of == "dedicated":
        _multiply_models(exported, setup.tenants)
    elif of in WHOLE:
        folder = repository / exported.name / "1"
        whole = WholeConfig.load(folder)
        copies = tuple(replace(whole.tenants[0], id=tenant_id(number)) for number in range(setup.tenants))
        replace(whole, tenants=copies).save(folder)
    else:
        folder = repository / exported.name / "1"
        multiply(folder, setup.tenants).save(folder / Backbone.TENANTS)
    if scheme == DISK:
        config = repository / exported.name / "config.pbtxt"
        config.write_text(config.read_text("utf-8").replace('string_value: "true"', 'string_value: "false"'), "utf-8")
    return exported


def _store(work: Path, setup: Setup) -> Store:
    folder = work / "store"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        random_store(folder, setup.config, random_tenants(1, setup.rank, LABELS))
        (folder / "done").touch()
    return Store(folder)


def _multiply_models(exported: ExportedScheme, count: int) -> None:
    """Makes `count` copies of the exported model. Files that are equal in all are hard links."""
    (first,) = exported.repository.iterdir()
    whole = WholeConfig.load(first / "1")
    config = (first / "config.pbtxt").read_text("utf-8")
    for number in range(count):
        model = exported.repository / exported.model(number)
        for file in sorted(path for path in (first / "1").rglob("*") if path.is_file() and path.name != WholeConfig.FILE):
            copy_file(file, model / file.relative_to(first))
        replace(whole, tenants=(replace(whole.tenants[0], id=tenant_id(number)),)).save(model / "1")
        (model / "config.pbtxt").write_text(config.replace(first.name, model.name), "utf-8")
    shutil.rmtree(first)


@dataclass(frozen=True)
class WeightMegabytes:
    """Megabytes that the weights of models take."""

    shared: float  # once for all models
    each: float  # for every model that is ready to answer; 0 where models share slots
    swapped: float  # copied to the device for a model that is not ready
    mapped: float  # tables, on disk and in the page cache

    @property
    def models_in_16_gb(self) -> int:
        """The models that fit, as HMI counts: those that are not on the device wait in host memory of the same size."""
        return int((DEVICE_MB - self.shared) / (self.each or self.swapped))


def weight_megabytes(exported: ExportedScheme) -> WeightMegabytes:
    if exported.scheme in (*WHOLE, DISK):
        folder = exported.repository / exported.model(0) / "1"
        weights = WholeConfig.load(folder).tenants[0].weights
        each = sum((folder / kind / f"{weights}.safetensors").stat().st_size for kind in ("bodies", "heads")) / MB
        return WeightMegabytes(0.0, each, each, _bytes_in(folder / "plot") / MB)
    folder = exported.repository / exported.name / "1"
    tenant = Snapshot.load(folder / Backbone.TENANTS).tenants[0]
    swapped = sum(Bank(folder / Backbone.BANKS / record.bank).layout.weight_bytes for record in tenant.records())
    return WeightMegabytes((folder / Backbone.UPPER).stat().st_size / MB, 0.0, swapped / MB, _bytes_in(folder / "plot") / MB)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class Served:
    """One scheme behind a real Triton."""

    def __init__(self, exported: ExportedScheme, server: TritonServer, swapper: Swapper | None) -> None:
        self.exported = exported
        self._server, self._swapper = server, swapper

    def url_for(self, tenants: int) -> str:
        """Returns the address for requests to the first tenants. Loads as many of their models as the budget allows."""
        swapper = self._swapper
        if swapper is None:
            return self._server.http_url
        loaded = self.loaded_of(tenants)

        def load(number: int) -> None:
            with swapper.residency.use(self.exported.model(number)):
                pass

        with ThreadPoolExecutor(LOADS_AT_ONCE) as pool:
            list(pool.map(load, range(loaded)))
        return swapper.url if tenants > loaded else self._server.http_url

    def loaded_of(self, tenants: int) -> int:
        """Returns how many of these tenants, from the first, have a loaded model after `url_for`."""
        return tenants if self._swapper is None else min(tenants, self.exported.setup.budget)

    @property
    def loads(self) -> int | None:
        return self._swapper.residency.loads if self._swapper is not None else None

    def private_mb(self) -> float:
        return Used.by(self._server.pid).private / MB


@contextmanager
def served(exported: ExportedScheme) -> Iterator[Served]:
    dedicated = exported.scheme == "dedicated"
    with ExitStack() as stack:
        server = stack.enter_context(TritonServer(exported.repository, load=() if dedicated else ("*",)))
        swapper = None
        if dedicated:
            swapper = stack.enter_context(Swapper(server.http_url, server.admin_header, exported.setup.budget))
        yield Served(exported, server, swapper)
