"""Each room imports only the rooms that arrows.yaml draws an arrow to."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / "clients"

DRAWN = yaml.safe_load((ROOT / "tests/arrows.yaml").read_text("utf-8"))
BASE = DRAWN["every room"]
ROOMS = {**dict.fromkeys(BASE, ()), **DRAWN["rooms"]}
CORE = {room for room in ROOMS if room.startswith("hplm.")} - {"hplm.cli"}
# The rooms that each room may import at any time, besides itself and the bare package `hplm`.
ARROWS = {room: {*BASE, *(CORE if "hplm" in drawn else ()), *drawn} for room, drawn in ROOMS.items()}
INSIDE_FUNCTIONS = {(room, to) for room, rooms in DRAWN["only inside functions"].items() for to in rooms}
PRODUCT = {*CORE, "hplm.cli", "builder", "backends"}
OTHERS_OF_THE_CLIENTS = {
    "hplm_client": {"numpy", "tritonclient", "aiohttp", "grpc"},  # the last two come with tritonclient
    "hplm_openai": {"hplm_client", "starlette", "uvicorn"},
}


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str
    runs_at_once: bool  # neither inside a function nor only for type checkers

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def room_of(module: str) -> str:
    """Returns the room of a module: `hplm.engine` for `hplm.engine.packing`, `builder` for `builder.store.store`."""
    package, _, below = module.partition(".")
    return f"hplm.{below.partition('.')[0]}" if package == "hplm" and below else package


def top_of(room: str) -> Path:
    return CLIENTS if room in OTHERS_OF_THE_CLIENTS else ROOT


def files_of(room: str) -> list[Path]:
    path = top_of(room) / room.replace(".", "/")
    return [path.with_suffix(".py")] if path.with_suffix(".py").exists() else sorted(path.rglob("*.py"))


def runs_later(node: ast.AST) -> bool:
    """Whether an import runs only in a function, or never."""
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return function or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


@cache
def imports_of(file: Path) -> list[Import]:
    def walk(node: ast.AST, runs: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(file, child.lineno, alias.name, runs) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                # `from hplm import errors` names a room, and `from hplm.plot import rows` a file.
                modules = {f"{child.module}.{alias.name}" for alias in child.names}
                yield from (Import(file, child.lineno, name, runs) for name in (child.module, *modules))
            elif not isinstance(child, ast.expr):  # expressions have no imports
                yield from walk(child, runs and not runs_later(child))

    return list(walk(ast.parse(file.read_text("utf-8")), True))


def wrong(room: str, files: list[Path]) -> Iterator[str]:
    found = [(one, room_of(one.module)) for file in files for one in imports_of(file)]
    for one, to in found:
        if to == room or to not in {*ARROWS, "tests"}:
            continue
        if to not in ARROWS[room] and (room, to) not in INSIDE_FUNCTIONS:
            yield f"{one}: no arrow {room} -> {to}"
        elif (room, to) in INSIDE_FUNCTIONS and one.runs_at_once:
            yield f"{one}: {room} -> {to} only inside functions"


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_only_rooms_that_its_arrows_allow(room):
    found = list(wrong(room, files_of(room)))
    assert not found, "\n".join(["wrong imports:", *found])


@pytest.mark.parametrize("room", ARROWS)
def test_the_files_of_a_room_import_each_other_in_one_direction(room):
    files = {".".join(file.relative_to(top_of(room)).with_suffix("").parts): file for file in files_of(room)}
    imported = {name: {one.module for one in imports_of(file)} & (files.keys() - {name}) for name, file in files.items()}
    TopologicalSorter(imported).prepare()  # raises a CycleError, which names the files


@pytest.mark.parametrize("room", OTHERS_OF_THE_CLIENTS)
def test_a_client_imports_only_what_its_package_requires(room):
    allowed = OTHERS_OF_THE_CLIENTS[room] | sys.stdlib_module_names | {room}
    strange = [one for file in files_of(room) for one in imports_of(file) if one.module.split(".")[0] not in allowed]
    assert not strange, "\n".join(map(str, strange))


def test_every_room_has_arrows():
    paths = [path for path in (ROOT / "hplm").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    rooms = {f"hplm.{path.stem}" for path in paths if path.stem != "__init__"}
    rooms |= {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"hplm", "tests"}
    rooms |= {path.parent.name for path in CLIENTS.glob("*/__init__.py")}
    assert rooms <= ARROWS.keys()


def test_the_product_does_not_import_registered_packages():
    for room in PRODUCT:
        assert not ARROWS[room] & {"bench", "research", "testing", "loadtest", "demo", "tests"}
