"""The studies of the report. Each compares some cases on the same tasks and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from demo.data import DemoTenant
from research.accuracy.recipes import Below, DomainRecipe, LargeDomainRecipe, Pretraining, RootRecipe
from research.accuracy.tiers import Tier

KEEPS = (1.0, 0.4, 0.1, 0.04, 0.004)
DROPOUT = 0.1  # BERT's own
WINDOWS = (2, 3, 5)


@dataclass(frozen=True)
class StudyCase:
    label: str
    scheme: str
    below: Below
    dropout: float = 0.0


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
    root = RootRecipe(tier.root_minutes, tier.root_keep, third, layers - third)
    below = DomainRecipe(root, tier.domain_minutes, tier.learn)
    if tier.domain_keep < 1:
        below = LargeDomainRecipe(**{**asdict(below), "root": root, "keep": tier.domain_keep}, most=tier.domain_keep)
    hplm, plot = StudyCase("hplm", "hplm", below), StudyCase("plot", "plot", below)

    def shaped(label: str, **shape: int) -> StudyCase:
        """Returns a case on the root's table alone, which is enough to compare splits and windows."""
        return StudyCase(label, "hplm", replace(below, keep=0.0, root=replace(root, **shape)))

    def over(scheme: str, times: int) -> StudyCase:
        minutes = times * tier.root_minutes
        return StudyCase(f"{scheme}, {minutes:g} minutes", scheme, replace(below, root=replace(root, minutes=minutes)))

    def pretrained(part: str) -> StudyCase:
        return StudyCase(part, "dedicated", Pretraining(part, tier.whole_minutes))

    lowers = sorted({max(1, round(layers * share)) for share in (1 / 6, 1 / 3, 1 / 2)})
    uppers = sorted({max(1, round(root.upper * share)) for share in (1 / 2, 3 / 4, 1)})
    whole = [StudyCase(name, name, None) for name in ("dedicated", "adapter", "shared")]
    compressed = [StudyCase(name, name, None) for name in ("distil", "tiny-half", "tiny-third")]
    unlearned = StudyCase("none", "hplm", replace(below, minutes=0))
    learned = (StudyCase(way, "hplm", replace(below, minutes=tier.learning_minutes, learn=way)) for way in ("masked", "distil"))
    dtypes = (StudyCase(dtype, "hplm", replace(below, dtype=dtype)) for dtype in ("fp16", "int8"))
    shares = (below.keep, *(keep for keep in KEEPS if keep < below.keep))  # the whole table, and smaller ones made from it
    keeps = (StudyCase(f"{keep:.1%}", "hplm", replace(below, keep=keep, root=root.cut_to(keep))) for keep in shares)
    adapted = (over(scheme, times) for scheme in ("plot", "hplm") for times in (1, 2))
    dropped = [StudyCase(f"{case.label}, dropout {DROPOUT:g}", case.scheme, case.below, DROPOUT) for case in (whole[0], hplm)]
    parts = [StudyCase(part, f"dedicated-{part}", None) for part in ("lower", "upper")]
    studies = [
        Study("schemes", "ways of making a model for a task", (whole[0], plot, hplm, *whole[1:]), False),
        Study("compressed", "fewer layers, taught by the task's dedicated BERT", (whole[0], hplm, *compressed)),
        Study("dropout", "hidden states left out in training", (whole[0], dropped[0], hplm, dropped[1])),
        Study("root", "minutes that the root is adapted", tuple(adapted), False),
        Study(
            "domains", "what a domain adds to the root",
            (
                StudyCase("root alone", "hplm", replace(below, keep=0.0)),
                StudyCase("n-grams", "hplm", replace(below, minutes=0)),
                StudyCase("n-grams, learned", "hplm", replace(below, minutes=tier.learning_minutes, learn="masked")),
                whole[0],
            ),
        ),
        Study("pretraining", "a domain's corpus learned, or only counted", (unlearned, *learned)),
        Study("keep", "share of the n-grams in the tables, the domain's and the root's", tuple(keeps)),
        Study("stored", "bits of a table's values", tuple(dtypes)),
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
        Study(
            "o1", "layers of a whole BERT that are further pretrained",
            (StudyCase("none", "dedicated", None), *map(pretrained, ("lower", "upper", "all"))),
        ),
        Study("o2", "layers of a whole BERT that are fine-tuned", (*parts, StudyCase("all", "dedicated", None))),
        *(
            Study(f"tenants-{count}", f"{count:,} tenants, samples of tasks", (whole[0], hplm, *whole[1:]), False, count)
            for count in tier.tenants
        ),
    ]  # fmt: skip
    return {study.name: study for study in studies}


def tenants_of(tasks: Sequence[tuple[DemoTenant, int]], count: int) -> list[tuple[DemoTenant, int]]:
    """Divides `count` tenants among the tasks in proportion to their training texts (HMI's Eq. 4), at least one to each."""
    total = sum(texts for _, texts in tasks)
    shares = [max(1.0, count * texts / total) for _, texts in tasks]
    given = [int(share) for share in shares]
    for place in sorted(range(len(tasks)), key=lambda i: given[i] - shares[i])[: max(0, count - sum(given))]:
        given[place] += 1
    return [(task, number) for (task, _), number in zip(tasks, given, strict=True)]
