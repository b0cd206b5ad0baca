"""Imports a saved adapter as the next version of a tenant in the store."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from builder.evaluation.tenant import evaluate_weights
from builder.importing.adapterhub import is_adapterhub, read_adapterhub
from builder.importing.files import read_json
from builder.importing.found import FoundAdapter, FoundHead, halves, records, storable, upper_layout, usual
from builder.importing.generative import import_generative
from builder.importing.heads import check_head, chosen_labels
from builder.importing.lower import NewDomain, check_mergeable, merged
from builder.importing.peft import is_peft, read_peft
from builder.store.store import Store, TenantFile, check_name
from builder.store.weights import Weights
from builder.tables.build_folder import held
from builder.tasks.examples import Labelled
from builder.tasks.labels import check_labels
from builder.tasks.tasks import training_task
from hplm.errors import MISFITS, InvalidInput
from hplm.tasks import check_backbone

APPROXIMATE = (
    "the adapter was trained on the original layers; here its lower part, if any, is merged into a lower half that was adapted "
    "to windows, and its upper part reads the tables' vectors: --test FILE measures the loss"
)


@dataclass(frozen=True)
class ImportOptions:
    domain: str = "root"
    labels: list[str] | None = None  # default: those in the files
    task: str | None = None  # default: what the files say
    new_domain: NewDomain | None = None  # built from the adapter's lower part
    test: Path | None = None  # labelled data to score the tenant on


def read_folder(folder: Path, model: str, task: str | None) -> tuple[FoundAdapter, FoundHead]:
    """Reads a folder that `peft` or `adapters` wrote."""
    path = folder / "adapter_config.json"
    config = read_json(path)
    for known, read in ((is_peft, read_peft), (is_adapterhub, read_adapterhub)):
        if known(config):
            try:
                return read(folder, model, task)
            except MISFITS as error:
                raise InvalidInput(
                    f"a configuration in {folder} has an option of another kind than its library writes ({error}): save the "
                    "adapter again"
                ) from error
    raise InvalidInput(f"{path} is neither of `peft` nor of `adapters`: save the adapter with one of them")


def import_tenant(
    store: Store, tenant_id: str, folder: Path, options: ImportOptions, device: torch.device, show_progress: bool = True
) -> tuple[TenantFile, dict[str, Any]]:
    """Returns the stored tenant and its report. Checks everything before it builds anything."""
    check_name("tenant", tenant_id)
    with held(store.tenant_work_folder(tenant_id), f"tenant {tenant_id!r}"):
        return _import(store, tenant_id, folder, options, device, show_progress)


def _import(
    store: Store, tenant_id: str, folder: Path, options: ImportOptions, device: torch.device, show_progress: bool
) -> tuple[TenantFile, dict[str, Any]]:
    if options.task is not None:
        check_backbone(options.task, store.config)
    if store.config.is_decoder:
        if options.labels or options.test is not None:
            raise InvalidInput("a tenant that generates text has no labels and no labelled test: leave --labels and --test out")
        return import_generative(store, tenant_id, folder, options.domain, options.new_domain, device)
    parent = (options.domain, store.latest(options.domain))
    adapter, head = read_folder(folder, store.model, options.task)
    labels = chosen_labels(head.task, options.labels, head.labels, len(head.weights["weight"]), head.source)
    check_head(head.weights, head.function, store.config, head.source)
    parts = halves(adapter, store.config)
    check_mergeable(adapter, parts.lower, store, options.new_domain)
    before = _version_before(store, tenant_id, head.task, labels)
    version = 1
    if before is not None:
        version, head, labels = before.version + 1, _reordered(head, labels, before.labels), before.labels
    labelled = _read_test(options.test, head.task, labels)

    layout = upper_layout(adapter, parts.upper, store.config)
    tenant = TenantFile(
        tenant_id, version, *parent, head.task, labels, rank=layout.size if layout else 0, head_function=head.function
    )
    stored_adapter = None
    if layout is not None:
        tenant = replace(tenant, adapter=layout.kind, places=usual(layout), function=layout.function)
        stored_adapter = [storable(record, layout, adapter.source) for record in records(parts.upper, layout)]
    weights = stored_adapter, storable(head.weights, tenant.head_layout(store.config), head.source)

    report: dict[str, Any] = {
        "task": head.task,
        "imported": {
            "from": str(folder),
            "library": adapter.library,
            "trained_on": adapter.base,
            "store_made_from": store.model,
        },
        "note": APPROXIMATE,
    }
    if labelled is not None:
        report["test"] = {f"on {parent[0]}": _score(store, tenant, weights, labelled, device, show_progress)}
    with ExitStack() as building:
        if options.new_domain is not None:
            table = building.enter_context(merged(store, parent, parts.lower, adapter, options.new_domain, device))
            if before is not None and (before.domain, before.domain_version) == (table.meta.domain, table.meta.version):
                return before, store.report(before)  # this import was interrupted after it had stored its tenant
            tenant = replace(tenant, domain=table.meta.domain, domain_version=table.meta.version)
            layers, megabytes = sorted(parts.lower), round(sum(table.meta.sizes().values()) / 1e6, 3)
            report["merged"] = {"domain": tenant.domain, "layers": layers, "ngrams": table.meta.keys, "mb": megabytes}
            if labelled is not None:
                report["test"][f"on {tenant.domain}"] = _score(store, tenant, weights, labelled, device, show_progress)
        store.chain(tenant.domain, tenant.domain_version)  # fails if the domain was deleted while the tenant was scored
        store.save_tenant(tenant, *weights, report)
    return tenant, report


def _version_before(store: Store, tenant_id: str, task: str, labels: list[str]) -> TenantFile | None:
    """Returns the tenant's version before. Refuses an update that changes its task or labels."""
    before = store.tenant(tenant_id)
    if before is not None and (before.task != task or set(before.labels) != set(labels)):
        raise InvalidInput(
            f"tenant {tenant_id!r} has a version {before.version} with task {before.task} and labels {sorted(before.labels)}, "
            f"and an update keeps both; this one has task {task} and labels {sorted(labels)}: import it under another --id"
        )
    return before


def _reordered(head: FoundHead, labels: list[str], wanted: list[str]) -> FoundHead:
    """Returns the head with its rows in the order of `wanted`, the order of the logits that clients know."""
    rows = [labels.index(label) for label in wanted]
    return replace(head, weights={**head.weights, **{part: head.weights[part][rows] for part in ("weight", "bias")}})


def _read_test(file: Path | None, task: str, labels: list[str]) -> Labelled | None:
    if file is None:
        return None
    labelled = training_task(task).read(file)
    check_labels(labelled, labels, "the imported head")
    return labelled


def _score(
    store: Store, tenant: TenantFile, weights: Weights, labelled: Labelled, device: torch.device, show_progress: bool
) -> dict[str, Any]:
    found = evaluate_weights(store, tenant, weights, labelled, device, show_progress)
    return {**found.scores.described(), "windows_found": found.texts.found}
