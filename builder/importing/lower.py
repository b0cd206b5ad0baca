"""Merges the lower part of an adapter into a lower stack, and builds a domain of it over a corpus."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from builder.importing.foreign import Changes, Foreign
from builder.store.store import Store
from builder.tables.build_folder import BuildFolder
from builder.tables.domain import DomainOptions, first_version
from hplm.adapters.layout import adapter_layout
from hplm.errors import InvalidInput
from hplm.model.stacks import LowerStack
from hplm.plot.table import Table


@dataclass(frozen=True)
class NewDomain:
    name: str
    corpus: list[Path]
    options: DomainOptions  # but its parent


@torch.no_grad()
def merge(lower: LowerStack, changes: Changes) -> None:
    """Adds B.A to W. The adapter was trained before the stack was adapted to windows, so this is an approximation."""
    for number, parts in changes.items():
        for place, part in parts.items():
            layout = adapter_layout(lower.config, "lora", len(part["a"]), (place,))
            assert layout is not None  # its rank is not 0
            weight = getattr(lower.layers[number], layout.projections[place]).weight
            weight[layout.outputs(place)] += part["b"] @ part["a"]


def check_mergeable(found: Foreign, lower: Changes, store: Store, new: NewDomain | None) -> None:
    layers = ", ".join(map(str, sorted(lower)))
    upper = list(range(store.config.lower_layers, store.config.lower_layers + store.config.upper_layers))
    train = f"train it with {found.leave_out} so that it changes only layers {upper[0]} to {upper[-1]}"
    if lower and found.kind != "lora":
        raise InvalidInput(
            f"{found.source} has a {found.kind} in lower layers ({layers}), which a domain's tables replace, and it cannot be "
            f"merged into weights: {train}"
        )
    if lower and new is None:
        raise InvalidInput(
            f"{found.source} changes lower layers ({layers}), which a domain's tables replace: {train}, or give --as-domain "
            "NAME --corpus FILE..., which makes its lower part a domain of its own"
        )
    if not lower and new is not None:
        raise InvalidInput(f"{found.source} changes no lower layer, so there is nothing to make a domain of: omit --as-domain")


def merged(
    store: Store, parent: str, changes: Changes, found: Foreign, new: NewDomain, device: torch.device
) -> AbstractContextManager[Table]:
    """Builds a child of `parent` with these changes, and holds its folder until the tenant on it is stored.

    The same call after an interruption continues.
    """

    def adapt(build: BuildFolder, parent: tuple[str, int]) -> None:
        lower = store.lower(*parent)
        merge(lower, changes)
        store.save_lower(new.name, 1, lower)

    stat, options = found.source.stat(), replace(new.options, parent=parent)
    adapter = [str(found.source.resolve()), stat.st_size, stat.st_mtime_ns]
    return first_version(store, new.name, new.corpus, options, {"adapter": adapter}, adapt, device)
