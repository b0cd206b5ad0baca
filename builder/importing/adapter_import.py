"""Imports a saved adapter as the next version of a tenant in the store, or none for a tenant that generates text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from builder.evaluation.evaluation import evaluate_weights
from builder.importing.adapters import MERGE, read_folder
from builder.importing.foreign import LEAVE_OUT, Foreign, check_shapes, storable, upper_adapter
from builder.importing.heads import chosen_labels, reordered
from builder.store.store import NO_TEXTS, Store, TenantVersion
from builder.store.version import Weights
from builder.tables.build_folder import locked_tenant
from builder.tasks.examples import Example
from builder.tasks.labels import check_answers, check_labels
from builder.tasks.tasks import training_task
from hplm.errors import InvalidInput
from hplm.tasks.tasks import GENERATE, check_backbone

WHOLE = "all layers are those that the adapter was trained on"
APPROXIMATE = "the adapter was trained on the original layers; here it reads the tables' vectors"
MEASURED = ": --test FILE measures the loss"


@dataclass(frozen=True)
class ImportOptions:
    domain: str = "root"
    labels: list[str] | None = None  # default: those in the files
    task: str | None = None  # default: what the files say
    test: Path | None = None  # labelled data to score the tenant on


def read_adapter(store: Store, tenant_id: str, folder: Path, options: ImportOptions) -> tuple[TenantVersion, Weights, Foreign]:
    """Reads and checks a saved adapter. Returns its tenant with its weights, and how it was saved."""
    config, domain = store.config, (options.domain, store.latest(options.domain))
    if options.task is not None:
        check_backbone(options.task, config)
    if config.is_decoder and (options.labels or options.test is not None):
        raise InvalidInput("a tenant that generates text has no labels and no labelled test: leave --labels and --test out")
    foreign = read_folder(folder, store.model, options.task, config.is_decoder)
    tenant, adapter, weights = TenantVersion(tenant_id, 1, *domain, GENERATE, [], rank=0), None, {}
    if (head := foreign.head) is not None:
        labels = chosen_labels(head.task, options.labels, head.labels, len(head.weights["weight"]), head.source)
        tenant = replace(tenant, task=head.task, labels=labels, head_function=head.function)
    lower, upper = foreign.halves(config)
    if lower:
        last, layers = config.lower_layers + config.upper_layers - 1, ", ".join(map(str, sorted(lower)))
        way_out = "import it into a store of `hplm build root --lower 0`" if config.is_decoder else f"else {MERGE}"
        raise InvalidInput(
            f"{foreign.source} changes lower layers ({layers}), which tables replace: train it with {LEAVE_OUT} so that it "
            f"changes only layers {config.lower_layers} to {last}; {way_out}"
        )
    if head is not None:
        layout = tenant.head_layout(config)
        check_shapes(head.weights, layout, config, head.source, "the head")
        weights = storable(head.weights, layout, head.source)
    if (made := upper_adapter(foreign, upper, config)) is not None:
        tenant, adapter = tenant.with_adapter(made[0]), made[1]
    return tenant, (adapter, weights), foreign


def import_tenant(
    store: Store, tenant_id: str, folder: Path, options: ImportOptions, device: torch.device
) -> tuple[TenantVersion, dict[str, Any]]:
    """Returns the stored tenant and its report. Checks everything before it builds anything."""
    config = store.config
    with locked_tenant(store, tenant_id):
        tenant, (adapter, weights), foreign = read_adapter(store, tenant_id, folder, options)
        labels = tenant.labels
        before, labelled = checked(store, tenant_id, tenant.task, labels, options.test)
        if before is not None:
            weights = reordered(weights, tenant.labels, before.labels)
            tenant = replace(tenant, version=before.version + 1, labels=before.labels)

        note = WHOLE if not config.lower_layers else APPROXIMATE + MEASURED * (not config.is_decoder)
        origin = origin_of(store, folder, "peft LoRA", foreign.base)
        report: dict[str, Any] = {"task": tenant.task, "imported": origin, "note": note}

        if labelled is not None:
            found = evaluate_weights(store, tenant, tenant.knowledge(config, adapter, weights), labelled, device)
            report["test"] = {f"on {tenant.domain}": {**found.scores.described(), "windows_found": found.texts.window_shares}}
        store.chain(tenant.domain, tenant.domain_version)  # fails if the domain was deleted while the tenant was scored
        store.save_tenant(tenant, adapter, weights, report)
        return tenant, report


def origin_of(store: Store, folder: Path, library: str, trained_on: str | None) -> dict[str, Any]:
    return {"from": str(folder.resolve()), "library": library, "trained_on": trained_on, "store_made_from": store.model}


def checked(
    store: Store, tenant_id: str, task: str, labels: list[str], test: Path | None
) -> tuple[TenantVersion | None, list[Example] | None]:
    """Returns the tenant's version before, and the labelled test. Refuses an update that changes its task or labels."""
    if (before := store.tenant(tenant_id)) is not None:
        check_answers(before, task, labels)
    labelled = training_task(task).read(test) if test is not None else None
    check_labels(labelled or (), labels, "the imported head")
    return before, labelled


def plain_tenant(store: Store, tenant_id: str, domain: str | None = None) -> TenantVersion:
    """Makes a tenant without an adapter, or the next version of a tenant: with its adapter, on the newest tables of its domain.

    `domain`: default: that of the version before, or root. Returns the version before if it is the same.
    """
    check_backbone(GENERATE, store.config)
    with locked_tenant(store, tenant_id):
        before = store.tenant(tenant_id)
        domain = domain or (before.domain if before is not None else "root")
        version = store.latest(domain)
        if before is None:
            tenant, weights, report = (
                TenantVersion(tenant_id, 1, domain, version, GENERATE, [], 0),
                (None, {}),
                {"task": GENERATE},
            )
        elif (before.domain, before.domain_version) == (domain, version):
            return before
        else:
            tenant = replace(before, version=before.version + 1, domain=domain, domain_version=version)
            weights, report = store.tenant_weights(before), store.report(before)
        store.save_tenant(tenant, *weights, report, seen=store.seen(before) if before is not None else NO_TEXTS)
    return tenant
