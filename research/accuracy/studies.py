"""The studies of the report. Each compares some cases on the same tasks and seeds. Tiers say how much is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from builder.training.finetuning import TrainingOptions
from research.accuracy.recipes import Recipe
from research.schemes.teachers import DEDICATED
from research.schemes.trained import HEAD_RATE, SCHEMES

# Rank 32 is a compromise among 8 to 128: rank 64 is 0.75 better on dev (four tasks), equal on test, and twice as large.
OPTIONS = TrainingOptions(adapter="lora", rank=32, learning_rate=HEAD_RATE, body_rate=SCHEMES["plot"].body_rate, patience=3)
PASSES = 3  # over the data, for a dedicated BERT; other schemes get as many passes as cost the same time
MOST_PASSES = 4  # more passes only memorise the training texts
SHARED_PASSES = 9  # for a scheme with only a head: forward passes alone, and a head memorises little


def passes(scheme: str, layers: int, upper: int) -> int:
    """Returns how many passes over the data a scheme may take. A layer's forward pass costs one, its gradients two."""
    if scheme == "shared":
        return SHARED_PASSES
    if scheme in SCHEMES and (kept := SCHEMES[scheme].kept) < 1:  # without its teacher's training and what it learns before
        return min(PASSES * 3 * layers // (layers + 3 * round(kept * layers)), MOST_PASSES)
    cost = {"plot": 3 * upper, "hplm": 3 * upper, "adapter": layers + 2 * upper}.get(scheme, 3 * layers)
    return min(PASSES * 3 * layers // cost, MOST_PASSES)


@dataclass(frozen=True)
class Tier:
    train: int  # texts of a task, if its source has as many
    dev: int
    test: int
    seeds: tuple[int, ...]
    times: int  # factor of the number of passes
    root_minutes: float
    domain_minutes: float  # 0, because a domain learns nothing in a few minutes that its root did not learn from the same texts
    learning_minutes: float  # of a domain, in the study of what it adds
    whole_minutes: float  # of further pretraining a whole BERT
    tenants: tuple[int, ...]  # numbers of tenants that resample the tasks
    tenant_texts: int = 300
    root_keep: float = 0.3
    domain_keep: float = 1.0  # share of the n-grams in a domain's table

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": self.train, "dev": self.dev, "test": self.test}

    def training(self, scheme: str, layers: int, upper: int, seed: int) -> TrainingOptions:
        """Returns the training options for a model with `layers` layers, of which `upper` are above the tables."""
        return replace(OPTIONS, epochs=self.times * passes(scheme, layers, upper), seed=seed)


TENANTS = (10, 100, 1000, 10_000)  # as in HMI's Fig. 14
TIERS = {
    # Minutes of one GPU: few texts to learn from, a root that reads 16 times the tokens in a step, and no domain's table.
    0: Tier(1000, 300, 2000, (0, 1, 2), 1, 1, 0, 1, whole_minutes=1, tenants=TENANTS[:1], root_keep=0.03, domain_keep=0),
    1: Tier(3000, 300, 1000, (0,), 1, 30, 0, 4, whole_minutes=4, tenants=TENANTS[:1]),
    2: Tier(3000, 500, 1000, (0, 1, 2), 2, 60, 15, 15, whole_minutes=15, tenants=TENANTS[:2]),
    3: Tier(6000, 500, 1000, (0, 1, 2), 2, 120, 30, 30, whole_minutes=30, tenants=TENANTS),
}

KEEPS = (1.0, 0.4, 0.1, 0.04, 0.004)
WINDOWS = (2, 3, 5)


@dataclass(frozen=True)
class StudyCase:
    label: str
    scheme: str
    recipe: Recipe | None = None  # None: the original BERT
    pretrained: str = ""  # the BERT's layers that are further pretrained on the domain's corpus: lower, upper, all
    teacher: str = ""  # dedicated: a BERT that is fine-tuned in full on the task's data
    longer: float = 1  # factor of the passes, which dev scores then do not end early


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    cases: tuple[StudyCase, ...]
    few_tasks: bool = True  # only the tasks of FEW; the main studies have all tasks
    tenants: int = 0  # number of tenants, made by resampling the tasks; 0: each task is a tenant


def studies_of(tier: Tier, layers: int) -> dict[str, Study]:
    """Returns the studies by name. `layers`: of the model; a third of them are lower layers."""
    third = max(1, layers // 3)
    root = tier.root_minutes, tier.root_keep, tier.root_keep
    keep = tier.domain_keep
    recipe = Recipe(third, layers - third, *root, minutes=tier.domain_minutes, keep=keep, largest=keep)

    def ours(label: str, scheme: str = "hplm", **changes: Any) -> StudyCase:
        return StudyCase(label, scheme, replace(recipe, **changes))

    def shaped(label: str, **shape: Any) -> StudyCase:
        """Returns a case on the root's table alone, which is enough to compare splits and windows."""
        return ours(label, keep=0, **shape)

    def over(scheme: str, times: int) -> StudyCase:
        minutes = times * tier.root_minutes
        return ours(f"{scheme}, {minutes:g} minutes", scheme, root_minutes=minutes)

    def cut(share: float) -> StudyCase:
        return ours(f"{share:.1%}", keep=share, root_keep=min(share, recipe.root_keep))

    dedicated, plot, hplm = StudyCase("dedicated", "dedicated"), ours("plot", "plot"), ours("hplm")
    others = StudyCase("adapter", "adapter"), StudyCase("shared", "shared")
    lowers = sorted({max(1, round(layers * share)) for share in (1 / 6, 1 / 3, 1 / 2)})
    uppers = sorted({max(1, round(recipe.upper * share)) for share in (1 / 2, 3 / 4, 1)})
    shares = (recipe.keep, *(share for share in KEEPS if share < recipe.keep))  # the whole table, and smaller ones cut from it
    over_minutes = (over(scheme, times) for scheme in ("plot", "hplm") for times in (1, 2))
    compressed = (StudyCase(name, name) for name in ("distil", "tiny-half", "tiny-third"))
    pretrained = (StudyCase(part, "dedicated", pretrained=part) for part in ("lower", "upper", "all"))
    tuned = (StudyCase(part, f"dedicated-{part}") for part in ("lower", "upper"))
    # A teacher passes over the texts as often as its pupil, and each of its passes costs as all layers do.
    budget = replace(hplm, label="hplm, equal budget", longer=(layers + recipe.upper) / recipe.upper)
    taught = replace(hplm, label="hplm, taught", teacher=DEDICATED)
    studies = [
        Study("schemes", "ways of making a model for a task", (dedicated, plot, hplm, *others), few_tasks=False),
        Study("compressed", "fewer layers, taught by the task's dedicated BERT", (dedicated, hplm, *compressed)),
        Study("teachers", "a dedicated BERT as the tenant's teacher", (dedicated, hplm, budget, taught), few_tasks=False),
        Study("root", "minutes that the root is adapted", tuple(over_minutes), few_tasks=False),
        Study(
            "domains", "what a domain adds to the root",
            (
                ours("root alone", keep=0), ours("n-grams", minutes=0),
                ours("n-grams, learned", minutes=tier.learning_minutes), dedicated,
            ),
        ),
        Study("keep", "share of the n-grams in the tables, the domain's and the root's", tuple(map(cut, shares))),
        Study("window", "tokens in a window", tuple(shaped(f"{n}-grams", window=n) for n in WINDOWS)),
        Study(
            "split", "where the layers are split: lower + upper",
            tuple(shaped(f"{n} + {layers - n}", lower=n, upper=layers - n) for n in lowers),
        ),
        Study(
            "lower", "lower layers under as many upper ones, those that follow them",
            tuple(shaped(f"{n} lower", lower=n, upper=layers - lowers[-1]) for n in lowers),
        ),
        Study("upper", "upper layers above the same lower ones", tuple(shaped(f"{n} upper", upper=n) for n in uppers)),
        Study("o1", "layers of a whole BERT that are further pretrained", (replace(dedicated, label="none"), *pretrained)),
        Study("o2", "layers of a whole BERT that are fine-tuned", (*tuned, replace(dedicated, label="all"))),
        *(
            Study(f"tenants-{n}", f"{n:,} tenants, samples of tasks", (dedicated, hplm, *others), False, n)
            for n in tier.tenants
        ),
    ]  # fmt: skip
    return {study.name: study for study in studies}


def tenants_of(texts: Sequence[int], count: int) -> list[int]:
    """Divides `count` tenants among tasks in proportion to their training texts (HMI's Eq. 4), at least one to each."""
    shares = [max(1.0, count * own / sum(texts)) for own in texts]
    given = [int(share) for share in shares]
    for place in sorted(range(len(texts)), key=lambda i: given[i] - shares[i])[: max(0, count - sum(given))]:
        given[place] += 1
    return given
