"""Exports each scheme with any number of tenants, for a comparison.

The tenants of a scheme are copies of one tenant. Their adapters and heads are pieces of one random pool. Their whole models are
one file, which is read again for each of them.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from bench.server import multiply, tenant_id
from builder.publish.export import SCHEME as HPLM
from builder.publish.export import Exported, export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, written_folder
from hplm.adapters.layout import Layout
from hplm.engine.backbone import Backbone
from hplm.model.config import BackboneConfig
from hplm.tenants.snapshot import Snapshot
from research.baselines.models import WholeConfig, files_of
from research.schemes.export import FLAT, WHOLE, export_scheme
from testing.random_repository import LABELS
from testing.random_store import random_store, random_tenants

COMPARED = (HPLM, *FLAT, "dedicated_inprocess", "compressed")
MB = 1e6
DEVICE_MB = 16_000.0  # the device of HMI's Table 2, which counts how many models fit


def megabytes(exported: Exported) -> dict[str, float]:
    """Returns the megabytes of weights: `shared` once, `each` for a model that is ready, `swapped` for one that is not.

    `mapped` are tables on disk. `models_in_16_gb` counts as HMI: other models wait in host memory of the same size.
    """
    folder = exported.folder / "1"
    mapped = sum(file.stat().st_size for file in (folder / Backbone.TABLES).rglob("*") if file.is_file()) / MB
    if (folder / WholeConfig.FILE).exists():
        files = files_of(folder, WholeConfig.load(folder).tenants[0].weights)
        shared, each = 0.0, sum(file.stat().st_size for file in files) / MB
        swapped = each
    else:
        records = Snapshot.load(folder / Backbone.TENANTS).tenants[0].records()
        shared, each = (folder / Backbone.UPPER).stat().st_size / MB, 0.0
        swapped = sum(Layout.of(record.layout).weight_bytes for record in records) / MB
    fitting = int((DEVICE_MB - shared) / swapped)
    return {"shared": shared, "each": each, "swapped": swapped, "mapped": mapped, "models_in_16_gb": fitting}


def random_tenant_store(folder: Path, config: BackboneConfig, rank: int) -> Store:
    """Returns the store of random weights in `folder`, with one tenant. Makes it if it is not there."""
    if not folder.exists():
        with written_folder(folder) as written:
            random_store(written, config, random_tenants(1, rank, LABELS))
    return Store(folder)


def export_compared(
    store: Store, repository: Path, scheme: str, tenants: int, budget: int, options: ServingOptions
) -> Exported:
    """Exports a store of one tenant in a scheme, into a folder that is replaced, and gives it more tenants."""
    shutil.rmtree(repository, ignore_errors=True)
    exported = (
        export(store, repository, options) if scheme == HPLM else export_scheme(store, repository, options, scheme, budget)
    )
    folder = exported.folder / "1"
    if scheme in WHOLE:
        whole = WholeConfig.load(folder)
        copies = tuple(replace(whole.tenants[0], id=tenant_id(number)) for number in range(tenants))
        replace(whole, tenants=copies).save(folder)
    else:
        multiply(folder, tenants).save(folder / Backbone.TENANTS)
    return exported
