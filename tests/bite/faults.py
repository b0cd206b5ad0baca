"""The faults that the tests should find: for each a text of the product, and what stands there instead (`faults.txt`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    name: str
    group: str
    rooms: tuple[str, ...]  # whose tests should find it, the likeliest first
    breaks: str  # what a user would see
    edits: tuple[Edit, ...]

    def tests(self, root: Path) -> list[str]:
        """Returns the folders of its rooms' tests: in `tests`, in `tests/builder`, or in the room itself."""
        found = [(f"tests/{room}", f"tests/builder/{room}", f"{room}/tests") for room in self.rooms]
        return [next((one for one in folders if (root / one).is_dir()), folders[0]) for folders in found]

    def likeliest(self, root: Path) -> list[str]:
        """Returns its rooms' files of tests that import what is edited."""
        modules = [edit.file.removeprefix("clients/").removesuffix(".py").replace("/", ".") for edit in self.edits]
        both = [module.rpartition(".") for module in modules]
        named = re.compile("|".join(rf"{re.escape(room)}(\.|\ import\ .*\b){name}\b" for room, _, name in both))
        files = [file for folder in self.tests(root) for file in sorted((root / folder).rglob("test_*.py"))]
        return [str(file.relative_to(root)) for file in files if named.search(file.read_text("utf-8"))]

    def stale(self, root: Path) -> str | None:
        """Says which edit no longer applies exactly once, or which room has no tests; None: all is well."""
        for folder in self.tests(root):
            if not (root / folder).is_dir():
                return f"{self.name}: there is no {folder}: name the folders of the tests that should find it"
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
            write(file, text.replace(edit.old, edit.new))
        return before


def write(file: Path, text: str) -> None:
    """Writes a file, and removes its compiled form: Python compares only the size and the second of a change."""
    file.write_text(text, "utf-8")
    Path(cache_from_source(str(file))).unlink(missing_ok=True)


def _read(text: str) -> Fault:
    """A line of name, group and rooms; what it breaks; then for each edit its file, its old (-) and new (+) lines."""
    head, breaks, *lines = text.splitlines()
    name, group, rooms = head.split(" | ")
    edits: list[tuple[str, dict[str, list[str]]]] = []
    for line in lines:
        if line[0] in "-+":
            edits[-1][1][line[0]].append(line[1:])
        else:
            edits.append((line, {"-": [], "+": []}))
    found = (Edit(file, "\n".join(said["-"]), "\n".join(said["+"])) for file, said in edits)
    return Fault(name, group, tuple(rooms.split()), breaks, tuple(found))


FAULTS = [_read(text) for text in Path(__file__).with_name("faults.txt").read_text("utf-8").strip().split("\n\n")]
