"""Recipes: how the root, the domain and the table are made that a tenant is trained on; and the stores made by them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from builder.learning.limits import Budget
from builder.store.store import Store
from builder.tables.build_folder import held, put_away
from builder.tables.counts import Counts
from builder.tables.domain import DomainOptions, build_domain
from builder.tables.root import RootOptions, build_root
from builder.tables.table import build_table
from hplm.model.windows import Window
from hplm.plot.table import Table
from research.result_file import digest_of


@dataclass(frozen=True)
class Recipe:
    """Smaller tables are cut from the largest one of the same layers."""

    lower: int
    upper: int
    root_minutes: float
    root_keep: float  # share of the n-grams in the root's table
    root_largest: float  # share in the largest table of this root
    window: int = 3
    minutes: float = 0  # of learning the domain's corpus; 0: the lower layers are the root's
    keep: float = 0  # share of the corpus's n-grams in the domain's table; 0: the domain has no table, only the root's
    largest: float = 1.0  # share in the domain's largest table

    @property
    def root(self) -> Recipe:
        return Recipe(self.lower, self.upper, self.root_minutes, self.root_keep, self.root_largest, self.window)

    @property
    def plain(self) -> Recipe:
        """The recipe without options that make no difference."""
        return self if self.keep else self.root

    @property
    def whole(self) -> Recipe:
        """The recipe of the largest tables."""
        return replace(self, root_keep=self.root_largest, keep=self.largest if self.keep else 0)

    @property
    def described(self) -> dict[str, Any]:
        """Returns the recipe as results name it, with what all of them had in common when others were studied."""
        return {**asdict(self.plain), "learn": "masked", "dtype": "fp16"}

    @property
    def lacks_ngrams(self) -> bool:
        """Whether a table has only a share of the n-grams, so that it matters which."""
        return min(self.keep, self.root_keep) < 1

    @property
    def store(self) -> str:
        """The folder's name. Recipes with the same root share a store."""
        return digest_of(self.root.described)

    def branch(self, domain: str) -> str:
        return f"{domain}-{digest_of(self.described)}" if self.keep else "root"


def build_store(
    stores: Path, recipe: Recipe, name: str, model: str, roots: list[Path], corpus: Path, device: torch.device
) -> Store:
    """Returns a store with the table of a domain, or of a root. Builds it, and what it is made from, if they are missing.

    `roots`: the corpora of the root. The next call continues an interrupted one.
    """
    folder, branch, whole = stores / recipe.store, recipe.branch(name), recipe.whole
    if (folder / "plot" / branch / "1/meta.json").exists():
        return Store(folder)
    given = name, model, roots, corpus, device
    if branch != "root":
        build_store(stores, recipe.root, *given)
    if recipe != whole:
        origin = build_store(stores, whole, *given)
        if not (folder / "store.json").exists():
            tokenizer = (origin.folder / "tokenizer.json").read_text("utf-8")
            Store.create(folder, origin.model, origin.config, tokenizer, origin.lower("root", 1), origin.upper())
        keep = recipe.root_keep if branch == "root" else recipe.keep
        recut_domain(origin, whole.branch(name), Store(folder), branch, keep, device)
    elif branch == "root":
        options = RootOptions(
            recipe.root_keep, name="report", lower=recipe.lower, upper=recipe.upper, window=Window(recipe.window)
        )
        build_root(model, roots, folder, options, Budget(minutes=recipe.root_minutes), device)
    else:
        options, budget = DomainOptions(keep=recipe.keep), Budget(minutes=recipe.minutes)
        build_domain(Store(folder), branch, [corpus], options, budget, device)
    return Store(folder)


def recut_domain(origin: Store, branch: str, store: Store, name: str, keep: float, device: torch.device) -> Table:
    """Makes another table of a branch's corpus by the same lower layers, as a new branch of a store with the same root."""
    build = store.work_folder(name, 1)
    with held(build, f"domain {name!r}"):
        if (name, 1) in store.domains():
            return store.table(name, 1)
        store.remove_branch(name, 1)  # of an interrupted call, perhaps with another size
        put_away(build)
        counts, lower, known = Counts(origin.counts_folder(branch, 1)), origin.lower(branch, 1), origin.table(branch, 1)
        store.save_lower(name, 1, lower)  # before the table, which makes it a branch
        spec = store.table_spec(name, 1, None if name == "root" else ("root", 1), known.meta.dtype, counts.tokens)
        table = build_table(store, spec, counts, lower, keep, device, build, known)
        put_away(build)
        return table
