"""The students of a tenant: shallow members whose logits add up to its answer, and how many of them answer under which load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hplm.adapters.record import Record
from hplm.calibration import Calibration

MOST = 16  # members: each is a text of its own in the queue


@dataclass(frozen=True)
class Student:
    """The weights of one member."""

    head: Record
    adapter: Record


@dataclass(frozen=True)
class Team:
    """A number of members that answer together, always the first ones."""

    members: Annotated[int, Meta(ge=1, le=MOST)]
    cost: Annotated[float, Meta(gt=0)]  # expected, of a token: 1.0 is a pass through all layers
    calibration: Calibration | None = None  # of their logits' sum; None: their answers have no confidence

    def part(self, tokens: int, size: int) -> tuple[int, int]:
        """Returns each member's part of a text's tokens and bytes, as they count in the queue: all read the same memory."""
        return max(1, round(tokens * self.cost / self.members)), -(-size // self.members)


@dataclass(frozen=True)
class Students:
    depth: Annotated[int, Meta(ge=1)]  # the upper layers that each member passes, the first ones
    teams: Annotated[tuple[Team, ...], Meta(min_length=1)]  # the largest first; smaller ones are for load
    members: tuple[Student, ...] = ()  # empty where the weights are not yet in a record file

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Students:
        """Reads what `described` has returned. Raises TypeError or ValueError if something is missing or wrong."""
        students = msgspec.convert(stored, cls)
        students.check()
        return students

    def described(self) -> dict[str, Any]:
        """Returns all but the records."""
        return {"depth": self.depth, "teams": [asdict(team) for team in self.teams]}

    def check(self) -> None:
        """Raises TypeError if its parts do not belong together."""
        for team in self.teams:
            if team.cost > team.members:
                raise TypeError(f"a team of {team.members} students has a cost of more passes")
            if team.calibration is not None:
                team.calibration.check()
        if not all(more.members > fewer.members and more.cost > fewer.cost for more, fewer in pairwise(self.teams)):
            raise TypeError("the teams of students do not get smaller and cheaper")
