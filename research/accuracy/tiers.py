"""How much is computed: the first tier in hours on two cores, the others on a machine with a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from builder.training.finetuning import TrainingOptions
from hplm.errors import InvalidInput
from research.schemes.trained import HEAD_RATE, SCHEMES

# Of ranks from 8 to 128 a compromise: 64 is 0.75 better on dev (four tasks), level on test, and twice as large.
OPTIONS = TrainingOptions(adapter="lora", rank=32, learning_rate=HEAD_RATE, body_rate=SCHEMES["plot"].body_rate, patience=3)
PASSES = 3  # over the data, of a dedicated BERT; all else has as many as cost no more than these
MOST_PASSES = 4  # more teach nothing but the training texts
SHARED_PASSES = 9  # of a head alone: what it reads is computed once


def passes(scheme: str, layers: int, upper: int) -> int:
    """A layer's forward pass costs one, its gradients two."""
    if scheme == "shared":
        return SHARED_PASSES
    cost = {"plot": 3 * upper, "hplm": 3 * upper, "adapter": layers + 2 * upper}.get(scheme, 3 * layers)
    return min(PASSES * 3 * layers // cost, MOST_PASSES)


@dataclass(frozen=True)
class Tier:
    train: int  # texts of a task, where its source has them
    dev: int
    test: int
    seeds: tuple[int, ...]
    times: int  # as many passes
    root_minutes: float
    domain_minutes: float  # 0: a few minutes teach a domain nothing that its root, which read the same texts, does not know
    learn: str  # how domains do
    learning_minutes: float  # of a domain, to see what it learns
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

    def training(self, scheme: str, layers: int, upper: int, seed: int) -> TrainingOptions:
        """Of a model of so many layers, so many of them above the tables, or with adapters."""
        return replace(OPTIONS, epochs=self.times * passes(scheme, layers, upper), seed=seed)


TIERS = {
    1: Tier(3000, 300, 1000, (0,), 1, 30, 0, "masked", 4, shape_minutes=3, whole_minutes=4, tenants=(10,)),
    2: Tier(3000, 500, 1000, (0, 1, 2), 2, 60, 15, "masked", 15, shape_minutes=30, whole_minutes=15, tenants=(10, 100)),
    3: Tier(6000, 500, 1000, (0, 1, 2), 2, 120, 30, "masked", 30, shape_minutes=120, whole_minutes=30, tenants=(10, 100, 1000)),
}
