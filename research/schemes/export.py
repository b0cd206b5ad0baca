"""Exports a store in another scheme: the same tenants, under the same name and with the same inputs and outputs.

    adapter               no tables: all layers computed, shared, with adapters
    shared                one BERT, a head for each tenant
    dedicated             one BERT for each tenant, each a Triton model of its own, `<backbone>-<tenant>`
    dedicated_inprocess   the same BERTs behind one Triton model, which keeps some in memory and reads the others when needed
    compressed            like dedicated_inprocess, with half of the layers

A store has only adapters and heads, so bodies are pretrained ones. Speed and memory are those of the scheme, answers are not.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from builder.publish.export import Exported, export, refuse_mixture
from builder.publish.model_configs import ServingOptions, check_options
from builder.store.store import Store, TenantFile
from hplm.engine.engine import INT8
from hplm.errors import InvalidInput
from research.baselines.models import WholeConfig
from research.schemes.pretrained import flat_store, pretrained
from research.schemes.whole import write_whole

FLAT = ("adapter", "shared")
WHOLE = ("dedicated", "dedicated_inprocess", "compressed")
NOTES = {
    "adapter": "All layers are the pretrained ones; adapters are the trained ones in the upper half, zero below it.",
    "shared": "All layers are the pretrained ones; heads were trained for other bodies.",
    "dedicated": "Every tenant's body is the pretrained one, a copy each; heads were trained for other bodies.",
    "dedicated_inprocess": "Every tenant's body is the pretrained one, a copy each; heads were trained for other bodies.",
    "compressed": "Half of the pretrained layers, a copy each, not distilled; heads were trained for other bodies.",
}
OF_WHOLE = ("dtype", "device", "threads", "batch_tokens", "queue_texts")  # options that whole models also have


def export_scheme(
    store: Store,
    repository: Path,
    options: ServingOptions,
    scheme: str,
    resident: int = 20,
    replace: bool = False,
) -> Exported:
    """Exports a store in another scheme. `resident`: models that a scheme without sharing keeps in memory."""
    if scheme not in NOTES:
        raise InvalidInput(f"unknown scheme {scheme!r}: choose {', '.join(NOTES)}")
    if resident < 1:
        raise InvalidInput(f"--resident {resident}: give 1 or more, because a model must be in memory to run")
    refuse_mixture(repository, store.config.name, scheme)
    if scheme in FLAT:
        return _export_flat(store, repository, options, scheme, replace)
    return _export_whole(store, repository, options, scheme, resident, replace)


def _export_flat(store: Store, repository: Path, options: ServingOptions, scheme: str, replace: bool) -> Exported:
    repository.mkdir(parents=True, exist_ok=True)
    # The scratch folder is on the repository's file system, for hard links.
    with tempfile.TemporaryDirectory(prefix=".scheme-", dir=repository) as scratch:
        flat = flat_store(store, Path(scratch) / "store", pretrained(store), with_adapters=scheme == "adapter")
        exported = export(flat, repository, options, replace)
    config = repository / exported.backbone / "config.pbtxt"
    with open(config, "a", encoding="utf-8") as file:
        file.write(f'\n# A baseline: {NOTES[scheme]}\nparameters {{ key: "scheme"  value {{ string_value: "{scheme}" }} }}\n')
    return exported


def _export_whole(
    store: Store, repository: Path, options: ServingOptions, scheme: str, resident: int, replace: bool
) -> Exported:
    tenants, name = store.tenants(), store.config.name
    if not tenants:
        raise InvalidInput(f"{store.folder} has no tenants to export: build one with `hplm build tenant`")
    check_options(store.config, options)
    _refuse_others(options, scheme)
    served = _served(repository, name)
    if not replace:
        _refuse_loss(repository, served, tenants)
    model = pretrained(store)
    if scheme == "compressed":
        model = model.shorter(max(1, model.config.upper_layers // 2))
    about, parameters, body = WholeConfig(scheme, NOTES[scheme], ()), {**asdict(options), "resident": resident}, None
    groups = {f"{name}-{tenant.id}": [tenant] for tenant in tenants} if scheme == "dedicated" else {name: tenants}
    for own, mine in groups.items():
        shutil.rmtree(repository / own, ignore_errors=True)
        body = write_whole(repository / own, store, model, mine, about, parameters, body)
    for left in {path for path in served.values() if path.name not in groups}:
        shutil.rmtree(left)
    return Exported(name, len(tenants), 0, repository / next(iter(groups)))


def _refuse_loss(folder: Path, known: dict[str, Path], tenants: list[TenantFile]) -> None:
    """Refuses to drop tenants that the repository serves. `known`: those served there now."""
    lost = sorted(set(known) - {tenant.id for tenant in tenants})
    if lost:
        raise InvalidInput(
            f"{folder} serves {len(lost)} tenants that this store does not have ({', '.join(lost[:5])}"
            f"{', ...' if len(lost) > 5 else ''}): export from the store they were built in, or give --replace to drop them"
        )


def _refuse_others(options: ServingOptions, scheme: str) -> None:
    """Raises if options are given that whole models do not have: they have no slots, no scheduler and no locked tables."""
    given = [name for name, value in asdict(options).items() if value != getattr(ServingOptions, name) and name not in OF_WHOLE]
    if given:
        raise InvalidInput(f"scheme {scheme!r} has no {', '.join(given)}: leave out these options")
    if options.dtype == INT8:
        raise InvalidInput(f"scheme {scheme!r} has no dtype int8, which is for layers that tenants share: choose fp32 or bf16")


def _served(repository: Path, name: str) -> dict[str, Path]:
    """Returns the model folder of each tenant that an export of whole models wrote for this backbone."""
    served = {}
    for file in repository.glob(f"{name}*/1/{WholeConfig.FILE}"):
        model = file.parent.parent
        tenants = [tenant.id for tenant in WholeConfig.load(file.parent).tenants]
        if model.name in (name, *(f"{name}-{tenant}" for tenant in tenants)):
            served |= dict.fromkeys(tenants, model)
    return served
