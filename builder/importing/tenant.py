"""Imports a saved adapter as the next version of a tenant in the store, or none for a tenant that generates text.

The lower part of an adapter can be merged into the lower stack of a new domain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from builder.evaluation.tenant import evaluate_weights
from builder.importing.adapters import read_folder
from builder.importing.foreign import Changes, Foreign, check_shapes, storable, upper_adapter
from builder.importing.heads import chosen_labels, reordered
from builder.store.store import Store, TenantFile
from builder.store.version import Weights
from builder.tables.build_folder import BuildFolder, held_tenant
from builder.tables.domain import DomainOptions, first_version
from builder.tasks.examples import Example
from builder.tasks.labels import check_answers, check_labels
from builder.tasks.tasks import training_task
from builder.training.cutting import hold
from hplm.adapters.layout import adapter_layout
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack
from hplm.plot.table import Table
from hplm.tasks import check_backbone

WHOLE = "all layers are those that the adapter was trained on"
APPROXIMATE = (
    "the adapter was trained on the original layers; here its lower part, if any, is merged into layers that see windows, and "
    "its upper part reads the tables' vectors"
)
MEASURED = ": --test FILE measures the loss"
GENERATE = "generate"


@dataclass(frozen=True)
class NewDomain:
    name: str
    corpus: list[Path]
    options: DomainOptions  # but its parent


@dataclass(frozen=True)
class ImportOptions:
    domain: str = "root"
    labels: list[str] | None = None  # default: those in the files
    task: str | None = None  # default: what the files say
    new_domain: NewDomain | None = None  # built from the adapter's lower part
    test: Path | None = None  # labelled data to score the tenant on


@torch.no_grad()
def merge(lower: LowerStack, changes: Changes) -> None:
    """Adds B.A to W. The adapter was trained before the stack was adapted to windows, so this is an approximation."""
    layout = adapter_layout(lower.config, "lora", rank=1)  # whatever the rank
    assert layout is not None
    hold(lower.layers, lower.layers, [changes.get(number, {}) for number in range(len(lower.layers))], layout)


def _check_mergeable(found: Foreign, lower: Changes, config: BackboneConfig, new: NewDomain | None) -> None:
    if not lower and new is not None:
        raise InvalidInput(f"{found.source} changes no lower layer, so there is nothing to make a domain of: omit --as-domain")
    last = config.lower_layers + config.upper_layers - 1
    train = f"train it with {found.leave_out} so that it changes only layers {config.lower_layers} to {last}"
    layers = f"lower layers ({', '.join(map(str, sorted(lower)))}), which a domain's tables replace"
    if lower and found.kind != "lora":
        raise InvalidInput(f"{found.source} has a {found.kind} in {layers}, and it cannot be merged into weights: {train}")
    if lower and new is None:
        raise InvalidInput(
            f"{found.source} changes {layers}: {train}, or give --as-domain NAME --corpus FILE..., which makes its lower part "
            "a domain of its own"
        )


def _merged(store: Store, parent: str, changes: Changes, source: Path, new: NewDomain, device: torch.device) -> Table:
    """Builds a child of `parent` with these changes. The same call after an interruption continues."""

    def adapt(build: BuildFolder, parent: tuple[str, int]) -> None:
        merge(lower := store.lower(*parent), changes)
        store.save_lower(new.name, 1, lower)

    stat, options = source.stat(), replace(new.options, parent=parent)
    adapter = {"adapter": [str(source.resolve()), stat.st_size, stat.st_mtime_ns]}
    return first_version(store, new.name, new.corpus, options, adapter, adapt, device)


def read_adapter(
    store: Store, tenant_id: str, folder: Path, options: ImportOptions
) -> tuple[TenantFile, Weights, Foreign, Changes]:
    """Reads and checks a saved adapter. Returns its tenant with its weights, how it was saved, and what it changes below."""
    config, domain = store.config, (options.domain, store.latest(options.domain))
    if options.task is not None:
        check_backbone(options.task, config)
    if config.is_decoder and (options.labels or options.test is not None):
        raise InvalidInput("a tenant that generates text has no labels and no labelled test: leave --labels and --test out")
    foreign = read_folder(folder, store.model, options.task, config.is_decoder)
    tenant, adapter, weights = TenantFile(tenant_id, 1, *domain, GENERATE, [], rank=0), None, {}
    if (head := foreign.head) is not None:
        labels = chosen_labels(head.task, options.labels, head.labels, len(head.weights["weight"]), head.source)
        tenant = replace(tenant, task=head.task, labels=labels, head_function=head.function)
    lower, upper = foreign.halves(config)
    _check_mergeable(foreign, lower, config, options.new_domain)
    if head is not None:
        layout = tenant.head_layout(config)
        check_shapes(head.weights, layout, config, head.source, "the head")
        weights = storable(head.weights, layout, head.source)
    if (made := upper_adapter(foreign, upper, config)) is not None:
        tenant, adapter = tenant.with_adapter(made[0]), made[1]
    return tenant, (adapter, weights), foreign, lower


def import_tenant(
    store: Store, tenant_id: str, folder: Path, options: ImportOptions, device: torch.device
) -> tuple[TenantFile, dict[str, Any]]:
    """Returns the stored tenant and its report. Checks everything before it builds anything."""
    config = store.config
    with held_tenant(store, tenant_id):
        tenant, (adapter, weights), foreign, lower = read_adapter(store, tenant_id, folder, options)
        labels = tenant.labels
        before, labelled = checked(store, tenant_id, tenant.task, labels, options.test)
        if before is not None:
            weights = reordered(weights, tenant.labels, before.labels)
            tenant = replace(tenant, version=before.version + 1, labels=before.labels)

        note = WHOLE if not config.lower_layers else APPROXIMATE + MEASURED * (not config.is_decoder)
        origin = origin_of(store, folder, foreign.library, foreign.base)
        report: dict[str, Any] = {"task": tenant.task, "imported": origin, "note": note}

        def score(tenant: TenantFile) -> None:
            if labelled is not None:
                found = evaluate_weights(store, tenant, tenant.knowledge(config, adapter, weights), labelled, device)
                scores = {**found.scores.described(), "windows_found": found.texts.found}
                report.setdefault("test", {})[f"on {tenant.domain}"] = scores

        score(tenant)
        if options.new_domain is not None:
            meta = _merged(store, options.domain, lower, foreign.source, options.new_domain, device).meta
            if before is not None and (before.domain, before.domain_version) == (meta.domain, meta.version):
                stored = store.report(before)  # this import may have been interrupted after it had stored its tenant
                if (stored.get("imported"), before.labels) != (origin, labels) or ("test" in stored) != (labelled is not None):
                    raise InvalidInput(
                        f"domain {meta.domain} was made for another import of tenant {before.id}: give --as-domain another name"
                    )
                return before, stored
            tenant = replace(tenant, domain=meta.domain, domain_version=meta.version)
            report["merged"] = {"domain": meta.domain, "layers": sorted(lower), "ngrams": meta.keys, "mb": meta.megabytes}
            score(tenant)
        store.chain(tenant.domain, tenant.domain_version)  # fails if the domain was deleted while the tenant was scored
        store.save_tenant(tenant, adapter, weights, report)
        return tenant, report


def origin_of(store: Store, folder: Path, library: str, trained_on: str | None) -> dict[str, Any]:
    return {"from": str(folder.resolve()), "library": library, "trained_on": trained_on, "store_made_from": store.model}


def checked(
    store: Store, tenant_id: str, task: str, labels: list[str], test: Path | None
) -> tuple[TenantFile | None, list[Example] | None]:
    """Returns the tenant's version before, and the labelled test. Refuses an update that changes its task or labels."""
    if (before := store.tenant(tenant_id)) is not None:
        check_answers(before, task, labels)
    labelled = training_task(task).read(test) if test is not None else None
    check_labels(labelled or (), labels, "the imported head")
    return before, labelled


def plain_tenant(store: Store, tenant_id: str, domain: str | None = None) -> TenantFile:
    """Makes a tenant without an adapter, or the next version of a tenant: with its adapter, on the newest tables of its domain.

    `domain`: default: that of the version before, or root. Returns the version before if it is the same.
    """
    check_backbone(GENERATE, store.config)
    with held_tenant(store, tenant_id):
        before = store.tenant(tenant_id)
        domain = domain or (before.domain if before is not None else "root")
        version = store.latest(domain)
        if before is None:
            tenant, weights, report = TenantFile(tenant_id, 1, domain, version, GENERATE, [], 0), (None, {}), {"task": GENERATE}
        elif (before.domain, before.domain_version) == (domain, version):
            return before
        else:
            tenant = replace(before, version=before.version + 1, domain=domain, domain_version=version)
            weights, report = store.tenant_weights(before), store.report(before)
        store.save_tenant(tenant, *weights, report)
    return tenant
