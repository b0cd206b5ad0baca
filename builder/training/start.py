"""The start of a tenant's training: random weights, or the weights of an earlier version (HMI 4.1 d)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from builder.console import say
from builder.store.store import Store, TenantVersion
from builder.training.finetuning import TrainingOptions, adapter_of
from hplm.adapters.layout import Layout
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.tasks.tasks import find_task
from hplm.tenants.embedding import Embedding

ANEW = 0  # instead of a version: random weights
ADAPTER = ("adapter", "rank", "places", "function", "dtype")


def form_of(before: TenantVersion | None, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with what they leave open about adapter and head: these are as in the version before."""
    if before is None:
        return given
    same_kind = given.get("adapter", before.adapter) == before.adapter
    return {name: getattr(before, name) for name in ("head_function", *(ADAPTER if same_kind else ()))} | given


def chosen_embedding(
    task: str, before: TenantVersion | None, config: BackboneConfig, given: dict[str, Any]
) -> Embedding | None:
    """Returns how a tenant makes its vectors: as the version before, unless other fields are given. None: it has a head."""
    if not find_task(task).is_vector:
        if given:
            named = {"prefixes": "query-prefix or --passage-prefix"}.get(name := min(given), name)
            raise InvalidInput(f"--{named} is for the task embed, and this tenant is to {task}: leave it out")
        return None
    known = before.embedding if before is not None else None
    usual = known or Embedding(config.hidden)
    own = replace(usual, **given | {"prefixes": {**usual.prefixes, **given.get("prefixes", {})}})
    if not 1 <= own.dimensions <= config.hidden:
        raise InvalidInput(f"--dimensions {own.dimensions}: give 1 to {config.hidden}, the width of the backbone")
    if known is not None and own.dimensions != known.dimensions:
        raise InvalidInput(
            f"--dimensions {own.dimensions}: the version before has {known.dimensions}, on which clients rely: leave it out, "
            "or choose another --id"
        )
    return own


def chosen_start(store: Store, tenant_id: str, before: TenantVersion | None, digest: str, wanted: int | None) -> int:
    """Returns the version whose weights are trained on, or ANEW, and says why. `digest`: of the training data.

    New data are learned on top of the newest version. Data that it has learned are not learned on top of themselves: the
    training starts where that version's did.
    """
    if wanted is not None:
        check_version(store, tenant_id, wanted)
        return wanted
    if before is None:
        return ANEW
    report = store.report(before)
    if report.get("training", {}).get("digest") != digest:
        say(f"tenant {tenant_id}: the data are new, so version {before.version} is trained on; --fresh starts anew")
        return before.version
    start = report.get("from_version", ANEW)
    where = "anew" if start == ANEW else f"from version {start}"
    say(
        f"tenant {tenant_id}: version {before.version} has learned these data, so training starts where that version did, "
        f"{where}; --from-version {before.version} learns them on top of it"
    )
    return start


def check_version(store: Store, tenant_id: str, wanted: int) -> None:
    """Refuses a start that the tenant does not have."""
    if wanted not in (ANEW, *(versions := store.tenant_versions(tenant_id))):
        known = ", ".join(map(str, versions)) or "none yet"
        raise InvalidInput(f"--from-version {wanted}: tenant {tenant_id!r} has no such version; known are {known}")


def check_form(start: TenantVersion, options: TrainingOptions, config: BackboneConfig) -> None:
    """Refuses options that ask for another adapter than the start has: its weights would not fit."""
    known, asked = start.adapter_layout(config), adapter_of(config, options)
    if known != (replace(asked, dtype=start.dtype) if asked is not None else None):
        raise InvalidInput(
            f"version {start.version} of tenant {start.id!r} has {_described(known)}, and the options ask for "
            f"{_described(asked)}: leave those options out to train that version on, or give --fresh"
        )


def _described(layout: Layout | None) -> str:
    return f"a {layout.kind} of rank {layout.size} on {', '.join(layout.places)}" if layout is not None else "no adapter"
