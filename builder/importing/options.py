"""The options of a training as the command shows them, in a module that imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from builder.learning.limits import check_options

FEWEST = 50  # different texts that a file needs


@Parameter(name="*", group="For checkpoints")
@dataclass(frozen=True)
class Matching:
    """The options of the training that makes a tenant answer as a checkpoint does."""

    rank: int = 32
    """rank of the LoRA"""
    epochs: int = 3  # on twelve checkpoints 0.74 +- 0.29 points better than one
    """passes over the texts"""
    learning_rate: float = 1e-3
    """learning rate"""
    batch_texts: Annotated[int, Parameter(parse=False)] = 16
    most_texts: int = 3000
    """most texts to take"""
    least: float = 0.9
    """do not store a tenant if a smaller share of its answers are the checkpoint's; 0 stores any"""
    seed: int = 0
    """seed of all random choices"""

    def __post_init__(self) -> None:
        check_options(self, rank=1, epochs=1, batch_texts=1, most_texts=FEWEST, least=(0, 1))
