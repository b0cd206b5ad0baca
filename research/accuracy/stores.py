"""Builds the stores that the report needs. The next call continues an interrupted one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from builder.adaptation.learning import Budget
from builder.store.store import Store
from builder.tables.domain import DomainOptions, build_domain, recut_domain
from builder.tables.root import RootOptions, build_root, recut_root
from hplm.model.windows import Window
from research.accuracy.recipes import CutRootRecipe, DomainRecipe, RootRecipe


@dataclass(frozen=True)
class Stores:
    model: str
    general: Sequence[Path]  # the root's corpora
    corpora: Mapping[str, Path]  # the domains'
    folder: Path
    device: torch.device

    def open(self, recipe: DomainRecipe) -> Store:
        return Store(self.folder / recipe.root.name)

    def build_root(self, recipe: RootRecipe) -> None:
        folder = self.folder / recipe.name
        if isinstance(recipe, CutRootRecipe):
            self.build_root(recipe.whole)
            recut_root(Store(self.folder / recipe.whole.name), folder, recipe.cut, self.device)
        elif not (folder / "plot/root/1").exists():
            options = RootOptions("report", recipe.lower, recipe.upper, Window(recipe.window), recipe.keep)
            build_root(self.model, list(self.general), folder, options, Budget(minutes=recipe.minutes), self.device)

    def build_domain(self, recipe: DomainRecipe, domain: str) -> None:
        """Builds a domain and its table. The root must exist."""
        if not recipe.keep:
            return
        store, name = self.open(recipe), recipe.branch(domain)
        origin, whole = self.open(recipe.whole), recipe.whole.branch(domain)
        if not origin.table_folder(whole, 1).exists():
            options, budget = DomainOptions(learn=recipe.learn, keep=recipe.whole.keep), Budget(minutes=recipe.minutes)
            build_domain(origin, whole, [self.corpora[domain]], options, budget, self.device)
        if not store.table_folder(name, 1).exists():
            recut_domain(origin, whole, store, name, recipe.keep, recipe.dtype, self.device)

    def missing(self, wanted: Iterable[tuple[DomainRecipe, str]]) -> list[tuple[DomainRecipe, str]]:
        """Returns each missing table once, whole tables before the smaller ones that are made from them."""
        needed = dict.fromkeys((recipe.whole, domain) for recipe, domain in wanted if recipe.keep)
        needed |= dict.fromkeys((recipe, domain) for recipe, domain in wanted if recipe.keep)
        return [found for found in needed if not self._is_there(*found)]

    def _is_there(self, recipe: DomainRecipe, domain: str) -> bool:
        return (self.folder / recipe.root.name / "plot" / recipe.branch(domain) / "1").exists()
