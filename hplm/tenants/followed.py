"""The file FOLLOWED: it marks a state that `hplm follow` copies from another machine, and says how far the copy is.

Such a state is changed by its follower alone. The file HEARD beside it says when the follower last heard of the source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hplm.errors import MISFITS, Broken

FORMAT = 2


@dataclass(frozen=True)
class Heard:
    """Unix times that a follower writes about once a second. They are not synced to the disk: the next ones come soon."""

    answered: float  # when the source last answered; 0 if it never did
    equal: float  # when the copy was last equal to it; if it never was, when it began to follow

    def save(self, path: Path) -> None:
        temporary = path.with_name(path.name + ".writing")
        temporary.write_text(f"{self.answered} {self.equal}\n", "utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Heard | None:
        """Returns None if there is no such file, or only a part of it, as after a crash of the machine."""
        try:
            answered, equal = map(float, path.read_text("utf-8").split())
        except (FileNotFoundError, ValueError):
            return None
        return cls(answered, equal)


@dataclass(frozen=True)
class Reached:
    """The generations of the source that a generation of the copy stands for."""

    whole: int = 0  # the newest one of which everything is in it
    removed: int = 0  # the newest one of which all that it removed is gone


@dataclass(frozen=True)
class Followed:
    source: str  # address
    reached: Mapping[int, Reached] = field(default_factory=dict[int, Reached])  # by generation of the copy
    trouble: str = ""  # why the copy is behind, if it is
    since: float = 0.0  # Unix time of the trouble's begin
    digest: str = ""  # SHA-256 of the source's snapshot of the newest generation; none of generation 0
    went_back: bool = False  # the source was restored, so generations of the same number may be others

    @property
    def newest(self) -> int:
        """The newest generation of the source that was ever seen here."""
        return max((reached.removed for reached in self.reached.values()), default=0)

    def save(self, path: Path) -> None:
        stored = {"format": FORMAT, **asdict(self)}
        temporary = path.with_name(path.name + ".writing")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(stored, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Followed:
        try:
            stored = json.loads(path.read_text("utf-8"))
            if stored["format"] != FORMAT:
                raise ValueError(f"format {stored['format']!r}")
            reached = {int(generation): Reached(**numbers) for generation, numbers in stored["reached"].items()}
            trouble, since = str(stored["trouble"]), float(stored["since"])
            return cls(str(stored["source"]), reached, trouble, since, str(stored["digest"]), bool(stored["went_back"]))
        except MISFITS as error:
            raise Broken(f"{path} cannot be read ({error}): begin the copy anew in an empty --state") from None
