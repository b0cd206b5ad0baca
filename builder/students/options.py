"""The options of students as the command shows them, in a module that imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from builder.learning.limits import check_options


@Parameter(name="*")
@dataclass(frozen=True)
class StudentOptions:
    depth: Annotated[int, Parameter(name="--layers")]
    """upper layers that each student passes"""
    students: int = 1
    """most students to try"""
    rank: int = 48
    """of each student's LoRA"""
    epochs: int = 9
    """passes over the texts, of each student and then of all together"""
    learning_rate: float = 3e-3
    """learning rate"""
    batch_texts: Annotated[int, Parameter(parse=False)] = 16
    seed: int = 0
    """seed of all random choices"""

    def __post_init__(self) -> None:
        from hplm.tenants.students import MOST

        check_options(self, students=(1, MOST), rank=1, epochs=1)
