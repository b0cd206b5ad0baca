"""Tiers: how much the report computes. The first one takes hours on two cores, the others need a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from builder.training.finetuning import TrainingOptions
from hplm.errors import InvalidInput
from research.schemes.trained import HEAD_RATE, SCHEMES

# Rank 32 is a compromise among 8 to 128: rank 64 is 0.75 better on dev (four tasks), equal on test, and twice as large.
OPTIONS = TrainingOptions(adapter="lora", rank=32, learning_rate=HEAD_RATE, body_rate=SCHEMES["plot"].body_rate, patience=3)
PASSES = 3  # over the data, for a dedicated BERT; other schemes get as many passes as cost the same time
MOST_PASSES = 4  # more passes only memorise the training texts
SHARED_PASSES = 9  # for a scheme with only a head, whose input is computed once


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
    learn: str  # how domains learn
    learning_minutes: float  # of a domain, in the study of what it learns
    whole_minutes: float  # of further pretraining a whole BERT
    tenants: tuple[int, ...]  # numbers of tenants that resample the tasks
    tenant_texts: int = 300
    root_keep: float = 0.3
    domain_keep: float = 1.0  # share of the n-grams in a domain's table

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": self.train, "dev": self.dev, "test": self.test}

    def with_seeds(self, listed: str) -> Tier:
        try:
            return replace(self, seeds=tuple(int(seed) for seed in listed.split(",")))
        except ValueError:
            raise InvalidInput(f"--seeds {listed!r}: give numbers with commas between them, such as 0,1,2") from None

    def training(self, scheme: str, layers: int, upper: int, seed: int) -> TrainingOptions:
        """Returns the training options for a model with `layers` layers, of which `upper` are above the tables."""
        return replace(OPTIONS, epochs=self.times * passes(scheme, layers, upper), seed=seed)


TENANTS = (10, 100, 1000, 10_000)  # as in HMI's Fig. 14
TIERS = {
    1: Tier(3000, 300, 1000, (0,), 1, 30, 0, "masked", 4, whole_minutes=4, tenants=TENANTS[:1]),
    2: Tier(3000, 500, 1000, (0, 1, 2), 2, 60, 15, "masked", 15, whole_minutes=15, tenants=TENANTS[:2]),
    3: Tier(6000, 500, 1000, (0, 1, 2), 2, 120, 30, "masked", 30, whole_minutes=30, tenants=TENANTS),
}

# Public texts are longer and their corpora larger. Tier 1 is a first look, in some 20 minutes of one core: few and short texts,
# and a root that has learned little.
PUBLIC_WORDS = {1: 64, 2: 100, 3: 100}
PUBLIC = {
    1: replace(TIERS[1], train=400, test=1000, root_minutes=4, learning_minutes=1.5, root_keep=0.03, domain_keep=0.03),
    2: replace(TIERS[2], train=6000, test=8000, root_keep=0.1, domain_keep=0.1),  # with a root of an hour
    3: replace(TIERS[3], train=12000, test=8000),
}
