"""How much is computed: the first tier in hours on two cores, the others on a machine with a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from builder.evaluation.schemes import SCHEMES

ALL = ("dedicated", "plot", "hplm", "adapter", "shared")
assert {*ALL} == {*SCHEMES, "hplm"}


@dataclass(frozen=True)
class Tier:
    root_minutes: float
    domain_minutes: float
    learn: str
    train: int  # texts of a task, where its source has them
    dev: int
    test: int
    seeds: tuple[int, ...]
    epochs: int
    schemes: tuple[str, ...] = ALL

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": self.train, "dev": self.dev, "test": self.test}


TIERS = {
    1: Tier(20, 2, "distil", train=1500, dev=300, test=500, seeds=(0,), epochs=3),
    2: Tier(60, 15, "masked", train=3000, dev=500, test=1000, seeds=(0, 1, 2), epochs=6),
    3: Tier(120, 30, "masked", train=6000, dev=500, test=1000, seeds=(0, 1, 2), epochs=10),
}
