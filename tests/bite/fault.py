"""A fault that the tests should find: exact text of the product, and what stands there instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HISTORIC = "historic"  # the group of faults that this project once had


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    name: str
    group: str  # HISTORIC, or the room of a mutation
    breaks: str  # what a user would see
    rooms: tuple[str, ...]  # keys of `tests.bite.rooms.ROOMS`: the tests that should find it, those likeliest first
    edits: tuple[Edit, ...]

    def stale(self, root: Path) -> str | None:
        """Says which edit no longer applies exactly once; None: all do."""
        for edit in self.edits:
            file = root / edit.file
            times = file.read_text("utf-8").count(edit.old) if file.exists() else 0
            if times != 1:
                return f"{self.name}: its text is {times} times in {edit.file}: write the edit anew, or remove the fault"
        return None

    def put_into(self, root: Path) -> dict[Path, str]:
        """Edits the files. Returns their text before."""
        before: dict[Path, str] = {}
        for edit in self.edits:
            file = root / edit.file
            text = file.read_text("utf-8")
            before.setdefault(file, text)
            file.write_text(text.replace(edit.old, edit.new), "utf-8")
        return before


def historic(name: str, breaks: str, rooms: str, *edits: tuple[str, str, str]) -> Fault:
    return Fault(name, HISTORIC, breaks, tuple(rooms.split()), tuple(Edit(*edit) for edit in edits))


def mutation(room: str, name: str, breaks: str, file: str, old: str, new: str, more: str = "") -> Fault:
    """A fault of one line. `more`: rooms whose tests may find it too."""
    return Fault(f"{room}-{name}", room, breaks, (room, *more.split()), (Edit(file, old, new),))
