"""The students of a tenant: shallow members whose logits add up to its answer, and how many of them answer under which load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hplm.adapters.record import Record
from hplm.levels.calibration import TEMPERATURE, Calibration

MOST = 16  # members: each is a text of its own in the queue


@dataclass(frozen=True)
class Student:
    """The weights of one member."""

    head: Record
    adapter: Record


@dataclass(frozen=True)
class Team:
    """A number of members that answer together, always the first ones."""

    members: int
    cost: float  # of a token: 1.0 is a pass through all layers
    calibration: Calibration | None = None  # of their logits' sum; None: their answers have no confidence

    def part(self, tokens: int, size: int) -> tuple[int, int]:
        """Returns each member's part of a text's tokens and bytes, as they count in the queue: all read the same memory."""
        return max(1, round(tokens * self.cost / self.members)), -(-size // self.members)


@dataclass(frozen=True)
class Students:
    depth: int  # the upper layers that each member passes, the first ones
    teams: tuple[Team, ...]  # the largest first; smaller ones are for load
    members: tuple[Student, ...] = ()  # empty where the weights are not yet in a record file

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Students:
        """Reads what `described` has returned. Raises TypeError, KeyError or ValueError if something is missing or wrong."""
        teams = [
            Team(one["members"], one["cost"], Calibration.read(one["calibration"]) if one["calibration"] is not None else None)
            for one in stored["teams"]
        ]
        students = cls(stored["depth"], tuple(teams))
        students.check()
        return students

    def described(self) -> dict[str, Any]:
        """Returns all but the records."""
        return {"depth": self.depth, "teams": [asdict(team) for team in self.teams]}

    def check(self) -> None:
        """Raises TypeError if its parts do not belong together."""
        if type(self.depth) is not int or self.depth < 1 or not self.teams:
            raise TypeError(f"students of depth {self.depth} in {len(self.teams)} teams answer nothing")
        sizes = [(team.members, team.cost) for team in self.teams]
        if not all(type(members) is int and 1 <= members <= MOST and 0 < cost <= members for members, cost in sizes):
            raise TypeError(f"teams of {sizes} students: they have 1 to {MOST} members, and a cost of at most so many passes")
        for team in self.teams:
            if team.calibration is not None:
                team.calibration.check()
        if not all(more[0] > fewer[0] and more[1] > fewer[1] for more, fewer in pairwise(sizes)):
            raise TypeError("the teams of students do not get smaller and cheaper")

    def suits(self, labels: int) -> bool:
        """Whether the calibrations can be those of a tenant with this number of labels."""
        return all(
            team.calibration is None or (team.calibration.kind == TEMPERATURE and team.calibration.suits(labels))
            for team in self.teams
        )
