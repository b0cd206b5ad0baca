"""How much is computed: the first tier in hours on two cores, the others on a machine with a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from builder.training.finetuning import TrainingOptions
from hplm.errors import InvalidInput

# Passes over the data that cost as much computation as one pass of a dedicated BERT. In layers of one forward pass each
# (gradients are two more, or one where only the input has some), a dedicated BERT of 6 layers pays 18, its upper half above
# tables 9 (plot), an adapter on a whole BERT 9, an hPLM 6. What a head alone reads is computed once.
PASSES = {"plot": 2, "adapter": 2, "hplm": 3, "shared": 3}


@dataclass(frozen=True)
class Tier:
    train: int  # texts of a task, where its source has them
    dev: int
    test: int
    seeds: tuple[int, ...]
    passes: int  # over the data, of a dedicated BERT
    root_minutes: float
    domain_minutes: float
    learn: str  # how domains do
    shape_minutes: float  # of adapting each root of another split or window
    whole_minutes: float  # of further pretraining a whole BERT
    tenants: tuple[int, ...]  # that resample the tasks
    tenant_texts: int = 300
    root_keep: float = 0.3

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": self.train, "dev": self.dev, "test": self.test}

    def with_seeds(self, listed: str) -> Tier:
        try:
            return replace(self, seeds=tuple(int(seed) for seed in listed.split(",")))
        except ValueError:
            raise InvalidInput(f"--seeds {listed!r}: numbers with commas between them, such as 0,1,2") from None

    def training(self, scheme: str, seed: int) -> TrainingOptions:
        return replace(OPTIONS, epochs=self.passes * PASSES.get(scheme, 1), seed=seed)


OPTIONS = TrainingOptions(patience=3)

TIERS = {
    1: Tier(1500, 300, 1000, (0,), 3, 35, 3, "distil", shape_minutes=8, whole_minutes=5, tenants=(10,)),
    2: Tier(3000, 500, 1000, (0, 1, 2), 5, 60, 15, "masked", shape_minutes=30, whole_minutes=15, tenants=(10, 100)),
    3: Tier(6000, 500, 1000, (0, 1, 2), 5, 120, 30, "masked", shape_minutes=120, whole_minutes=30, tenants=(10, 100, 1000)),
}
