"""Imports a saved adapter as the next version of a tenant in the store, or none for a tenant that generates text."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from builder.evaluation.tenant import evaluate_weights
from builder.importing.adapterhub import is_adapterhub, read_adapterhub
from builder.importing.foreign import Foreign, read_json, records, storable, upper_layout
from builder.importing.heads import check_head, chosen_labels, reordered
from builder.importing.lower import NewDomain, check_mergeable, merged
from builder.importing.peft import is_peft, read_peft
from builder.store.store import Store, TenantFile
from builder.store.version import Weights
from builder.tables.build_folder import held_tenant
from builder.tasks.examples import Example
from builder.tasks.labels import check_labels
from builder.tasks.tasks import training_task
from builder.training.start import check_answers
from hplm.errors import MISFITS, InvalidInput
from hplm.tasks import check_backbone

WHOLE = "all layers are those that the adapter was trained on"
APPROXIMATE = (
    "the adapter was trained on the original layers; here its lower part, if any, is merged into layers that see windows, and "
    "its upper part reads the tables' vectors"
)
MEASURED = ": --test FILE measures the loss"
GENERATE = "generate"


@dataclass(frozen=True)
class ImportOptions:
    domain: str = "root"
    labels: list[str] | None = None  # default: those in the files
    task: str | None = None  # default: what the files say
    new_domain: NewDomain | None = None  # built from the adapter's lower part
    test: Path | None = None  # labelled data to score the tenant on


def read_folder(folder: Path, model: str, task: str | None, is_decoder: bool = False) -> Foreign:
    """Reads a folder that `peft` or `adapters` wrote. `model`: the checkpoint that the store was made from."""
    path = folder / "adapter_config.json"
    config = read_json(path)
    try:
        if is_peft(config):
            return read_peft(folder, model, task, is_decoder)
        if is_adapterhub(config) and not is_decoder:
            return read_adapterhub(folder, model, task)
    except MISFITS as error:
        raise InvalidInput(
            f"a configuration in {folder} has an option of another kind than its library writes ({error}): save the adapter "
            "again"
        ) from error
    libraries = "`peft`, the only library whose adapters of decoders can be imported" if is_decoder else "`peft` or `adapters`"
    raise InvalidInput(f"{path} is not of {libraries}: save the adapter with it")


def import_tenant(
    store: Store, tenant_id: str, folder: Path, options: ImportOptions, device: torch.device
) -> tuple[TenantFile, dict[str, Any]]:
    """Returns the stored tenant and its report. Checks everything before it builds anything."""
    with held_tenant(store, tenant_id), ExitStack() as building:
        if options.task is not None:
            check_backbone(options.task, store.config)
        config = store.config
        if config.is_decoder and (options.labels or options.test is not None):
            raise InvalidInput("a tenant that generates text has no labels and no labelled test: leave --labels and --test out")
        parent = (options.domain, store.latest(options.domain))
        foreign = read_folder(folder, store.model, options.task, config.is_decoder)
        head, task, labels, weights = foreign.head, GENERATE, [], {}
        if head is not None:
            task, weights = head.task, head.weights
            labels = chosen_labels(task, options.labels, head.labels, len(weights["weight"]), head.source)
            check_head(weights, head.function, config, head.source)
        lower, upper = foreign.halves(config)
        check_mergeable(foreign, lower, store, options.new_domain)
        before = version_before(store, tenant_id, task, labels)
        if before is not None:
            weights, labels = reordered(weights, labels, before.labels), before.labels
        labelled = read_test(options.test, task, labels)

        tenant = TenantFile(tenant_id, before.version + 1 if before else 1, *parent, task, labels, rank=0)
        stored: Weights = None, {}
        if head is not None:
            tenant = replace(tenant, head_function=head.function)
            stored = None, storable(weights, tenant.head_layout(config), head.source)
        if (layout := upper_layout(foreign, upper, config)) is not None:
            tenant = tenant.with_adapter(layout)
            stored = [storable(record, layout, foreign.source) for record in records(upper, layout)], stored[1]

        note = WHOLE if not config.lower_layers else APPROXIMATE + MEASURED * (not config.is_decoder)
        origin = origin_of(store, folder, foreign.library, foreign.base)
        report: dict[str, Any] = {"task": task, "imported": origin, "note": note}
        if labelled is not None:
            report["test"] = {f"on {parent[0]}": _score(store, tenant, stored, labelled, device)}
        if options.new_domain is not None:
            table = building.enter_context(merged(store, parent[0], lower, foreign, options.new_domain, device))
            if before is not None and (before.domain, before.domain_version) == (table.meta.domain, table.meta.version):
                return before, store.report(before)  # this import was interrupted after it had stored its tenant
            tenant = replace(tenant, domain=table.meta.domain, domain_version=table.meta.version)
            size = {"ngrams": table.meta.keys, "mb": table.meta.megabytes}
            report["merged"] = {"domain": tenant.domain, "layers": sorted(lower), **size}
            if labelled is not None:
                report["test"][f"on {tenant.domain}"] = _score(store, tenant, stored, labelled, device)
        store.chain(tenant.domain, tenant.domain_version)  # fails if the domain was deleted while the tenant was scored
        store.save_tenant(tenant, *stored, report)
        return tenant, report


def origin_of(store: Store, folder: Path, library: str, trained_on: str | None) -> dict[str, Any]:
    return {"from": str(folder.resolve()), "library": library, "trained_on": trained_on, "store_made_from": store.model}


def version_before(store: Store, tenant_id: str, task: str, labels: list[str]) -> TenantFile | None:
    """Returns the tenant's version before. Refuses an update that changes its task or labels."""
    before = store.tenant(tenant_id)
    if before is not None:
        check_answers(before, task, labels)
    return before


def read_test(file: Path | None, task: str, labels: list[str]) -> list[Example] | None:
    if file is None:
        return None
    labelled = training_task(task).read(file)
    check_labels(labelled, labels, "the imported head")
    return labelled


def _score(store: Store, tenant: TenantFile, weights: Weights, examples: list[Example], device: torch.device) -> dict[str, Any]:
    found = evaluate_weights(store, tenant, weights, examples, device)
    return {**found.scores.described(), "windows_found": found.texts.found}


def plain_tenant(store: Store, tenant_id: str, domain: str | None = None) -> TenantFile:
    """Makes a tenant without an adapter, or the next version of a tenant: with its adapter, on the newest tables of its domain.

    `domain`: default: that of the version before, or root. Returns the version before if it is the same.
    """
    check_backbone(GENERATE, store.config)
    with held_tenant(store, tenant_id):
        before = store.tenant(tenant_id)
        domain = domain or (before.domain if before is not None else "root")
        if before is None:
            tenant = TenantFile(tenant_id, 1, domain, store.latest(domain), GENERATE, [], rank=0)
            weights, report = (None, {}), {"task": GENERATE}
        else:
            tenant = replace(before, domain=domain, domain_version=store.latest(domain))
            if tenant == before:
                return before
            tenant = replace(tenant, version=before.version + 1)
            weights, report = store.tenant_weights(before), store.report(before)
        store.save_tenant(tenant, *weights, report)
    return tenant
