"""The students of a tenant: shallow members whose logits add up to its answer, and how many of them answer under which load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hplm.adapters.record import Record
from hplm.levels.calibration import TEMPERATURE, Calibration

MOST = 16  # members: each is a text of its own in the queue


@dataclass(frozen=True)
class Student:
    """The weights of one member."""

    head: Record
    adapter: Record


@dataclass(frozen=True)
class First:
    """The members of a team that answer alone where they are sure enough."""

    members: Annotated[int, Meta(ge=1, lt=MOST)]
    threshold: Annotated[float, Meta(ge=0, le=1)]  # how sure they must be
    leaves: Annotated[float, Meta(ge=0, le=1)]  # the share of all tokens whose texts they answer
    calibration: Calibration  # of their logits' sum


@dataclass(frozen=True)
class Team:
    """A number of members that answer together, always the first ones."""

    members: Annotated[int, Meta(ge=1, le=MOST)]
    cost: Annotated[float, Meta(gt=0)]  # expected, of a token: 1.0 is a pass through all layers
    calibration: Calibration | None = None  # of their logits' sum; None: their answers have no confidence
    first: First | None = None  # that are asked first, the others only about texts of which these are unsure; None: all are

    @property
    def asked(self) -> float:
        """The number of members that a token is expected to pass."""
        if self.first is None:
            return self.members
        return self.members - self.first.leaves * (self.members - self.first.members)

    @property
    def at_once(self) -> int:
        """The number of members that are asked first."""
        return self.members if self.first is None else self.first.members

    @property
    def calibrations(self) -> list[Calibration]:
        first = self.first.calibration if self.first is not None else None
        return [calibration for calibration in (self.calibration, first) if calibration is not None]

    def part(self, tokens: int, size: int) -> tuple[int, int]:
        """Returns each member's part of a text's tokens and bytes, as they count in the queue: all read the same memory."""
        return max(1, round(tokens * self.cost / self.asked)), -(-size // self.members)


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
            if team.first is not None and team.at_once >= team.members:
                raise TypeError(f"of a team of {team.members} students, {team.at_once} are asked first")
            for calibration in team.calibrations:
                calibration.check()
        if not all(more.members > fewer.members and more.cost > fewer.cost for more, fewer in pairwise(self.teams)):
            raise TypeError("the teams of students do not get smaller and cheaper")

    def suits(self, labels: int) -> bool:
        """Whether the calibrations can be those of a tenant with this number of labels."""
        own = [calibration for team in self.teams for calibration in team.calibrations]
        return all(calibration.kind == TEMPERATURE and calibration.suits(labels) for calibration in own)
