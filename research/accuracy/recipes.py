"""Recipes: how to make the root, the branch and the table that a tenant is trained on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class RootRecipe:
    minutes: float
    keep: float
    lower: int
    upper: int
    window: int = 3

    @property
    def name(self) -> str:
        return f"{self.lower}-{self.upper}-{self.window}-{self.minutes:g}-{self.keep:g}"

    @property
    def share(self) -> float:
        """Of the whole windows, those that its table has."""
        return self.keep

    @property
    def whole(self) -> RootRecipe:
        return self

    def cut_to(self, share: float) -> RootRecipe:
        """Returns the recipe of the same layers with at most this share of the n-grams."""
        return CutRootRecipe(**asdict(self), cut=share) if share < self.keep else self


@dataclass(frozen=True)
class CutRootRecipe(RootRecipe):
    cut: float = 1.0  # share of the n-grams that stay

    @property
    def name(self) -> str:
        return f"{super().name}-cut-{self.cut:g}"

    @property
    def share(self) -> float:
        return self.cut

    @property
    def whole(self) -> RootRecipe:
        own = asdict(self)
        del own["cut"]
        return RootRecipe(**own)


@dataclass(frozen=True)
class DomainRecipe:
    root: RootRecipe
    minutes: float  # of learning the domain's corpus; 0: the lower layers are the root's
    learn: str
    keep: float = 1.0  # of the corpus's n-grams; 0: the domain has no table, only the root's
    dtype: str = "fp16"

    @property
    def whole(self) -> DomainRecipe:
        """The recipe with all n-grams in 16 bits. Smaller tables are made from its lower layers and counts."""
        return replace(self, root=self.root.whole, keep=1.0, dtype="fp16")

    @property
    def plain(self) -> DomainRecipe:
        """The recipe as results name it: options that make no difference are left out."""
        if not self.keep:
            return DomainRecipe(self.root, 0, "masked", 0)
        return self if self.minutes else replace(self, learn="masked")

    @property
    def lacks_ngrams(self) -> bool:
        """Whether a table has only a share of the n-grams, so that it matters which."""
        return min(self.keep, self.root.share) < 1

    def branch(self, domain: str) -> str:
        if not self.keep:
            return "root"
        learned = f"{self.learn}-{self.minutes:g}" if self.minutes else "as-root"
        return f"{domain}.{learned}.{self.keep:g}-{self.dtype}"


@dataclass(frozen=True)
class LargeDomainRecipe(DomainRecipe):
    """A domain whose table of all n-grams would be too large."""

    most: float = 1.0  # share of the n-grams in its largest table, from which smaller ones are made

    @property
    def whole(self) -> LargeDomainRecipe:
        return replace(self, root=self.root.whole, keep=self.most, dtype="fp16")


@dataclass(frozen=True)
class Pretraining:
    """Further pretraining of a whole BERT on masked words of the domain's corpus (HMI's Fig. 7)."""

    part: str  # the layers that learn: lower, upper, all
    minutes: float

    @property
    def plain(self) -> Pretraining:
        return self


Below = DomainRecipe | Pretraining | None  # None: the unchanged original BERT
