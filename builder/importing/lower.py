"""Merges the lower part of an adapter into a lower stack, and builds a domain of it over a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from builder.importing.foreign import Changes, Foreign
from builder.options import check_keep
from builder.store.store import Store, check_name
from builder.tables.build_folder import BuildFolder, held, put_away, was_just_finished
from builder.tables.size import check_table, chosen_keep
from builder.tables.table import build_table
from hplm.adapters.layout import adapter_layout
from hplm.errors import InvalidInput
from hplm.model.stacks import LowerStack
from hplm.options import MIN_TOKENS
from hplm.plot.table import Table


@dataclass(frozen=True)
class NewDomain:
    name: str
    corpus: list[Path]
    keep: float | None = None  # default: all, or as many as a table usually takes (`chosen_keep`)
    dtype: str = "fp16"
    min_tokens: int = MIN_TOKENS

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_keep(self.keep)


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


@contextmanager
def merged(
    store: Store, parent: tuple[str, int], changes: Changes, found: Foreign, new: NewDomain, device: torch.device
) -> Iterator[Table]:
    """Builds a child of `parent`, and holds its folder until the tenant on it is stored.

    The same call after an interruption continues.
    """
    check_name("domain", new.name)
    stat = found.source.stat()
    adapter = [str(found.source.resolve()), stat.st_size, stat.st_mtime_ns]
    options = {name: value for name, value in asdict(new).items() if name != "corpus"}
    plan = {"parent": parent[0], "parent version": parent[1], "adapter": adapter, **options}
    working = store.work_folder(new.name, 1)
    with held(working, f"domain {new.name!r}"):
        if all(domain != new.name for domain, _ in store.domains()):
            build = BuildFolder(working, new.corpus, plan, clear=lambda: store.remove_branch(new.name, 1))
            table = _tabulated(store, parent, changes, new, build, device)
        elif was_just_finished(working, new.corpus, plan):
            table = store.table(new.name, 1)
        else:
            raise InvalidInput(f"domain {new.name!r} is in {store.folder} already: choose another --as-domain")
        yield table
        put_away(working)


def _tabulated(
    store: Store, parent: tuple[str, int], changes: Changes, new: NewDomain, build: BuildFolder, device: torch.device
) -> Table:
    if not (adapted := store.has_lower(new.name, 1)):
        tokens = build.corpus(store.tokenizer()).tokens
        if tokens < new.min_tokens:
            build.close()
            raise InvalidInput(
                f"the corpus has {tokens:,} tokens, fewer than {new.min_tokens:,}: most lookups would fall back to "
                f"{parent[0]!r}, which was built without the adapter. Give more text, or lower --min-tokens"
            )
    counts = build.count(store.space, store.tokenizer(), store.counts_folder(new.name, 1))
    keep = chosen_keep(counts, root=False, keep=new.keep)
    spec = store.table_spec(new.name, 1, parent, new.dtype, counts.tokens)
    if not adapted:
        lower = store.lower(*parent)
        with build.refusable():
            check_table(store.folder, spec, counts, keep, lower, device)
        merge(lower.cpu(), changes)
        store.save_lower(new.name, 1, lower)
    store.chain(*parent)  # fails if the parent was deleted meanwhile
    return build_table(store, spec, counts, store.lower(new.name, 1), keep, device, build.folder)
