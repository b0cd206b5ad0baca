"""Runs commands in this process, and a store with an export and a live state for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from builder.store.store import Store
from hplm.cli.main import application, main
from hplm.tenants.manager import Manager
from tests.support.message import mentions

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: object, status: int = 0) -> dict[str, Any]:
    """Returns what a command says under --json: one line."""
    (line,) = printed(capsys, *arguments, "--json", status=status).strip().splitlines()
    return json.loads(line)


def printed(capsys: Capture, *arguments: object, status: int = 0) -> str:
    """Returns what a command prints for people."""
    return _said(capsys, arguments, status)[0]


def refused(capsys: Capture, *arguments: object) -> str:
    """Returns the error of a command."""
    return _said(capsys, arguments, 1)[1]


def _said(capsys: Capture, arguments: tuple[object, ...], status: int) -> tuple[str, str]:
    words = [*map(str, arguments)]
    capsys.readouterr()
    found, (out, err) = main(words), capsys.readouterr()
    assert found == status, f"hplm {' '.join(words)} ended with {found}: {out}{err}"
    return out, err


def leaves(app: App | None = None, name: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns all commands, as words."""
    app = app or application()
    below = [word for word in app if not word.startswith("-")]
    return [leaf for word in below for leaf in leaves(app[word], (*name, word))] if below else [name]


def expect_broken(said: str, *named: list[object]) -> None:
    """`hplm verify` has named these, each in a line, after a line with their number; and nothing else."""
    first, *broken = said[said.index("hplm verify: ") :].splitlines()
    assert len(broken) == len(named) and mentions(first, len(broken)), said
    for things in named:
        assert any(mentions(line, *things) for line in broken), things


def flip(path: Path, offset: int = -1) -> None:
    """Flips a bit in a copy of a file, because exported files are hard links to those of the store."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.unlink()
    path.write_bytes(content)


@dataclass(frozen=True)
class Live:
    """A store, its export and a live state in one folder."""

    folder: Path

    def __iter__(self) -> Iterator[list[object]]:
        """Yields the options that name the store, and those of the repository and the state."""
        yield ["--store", self.folder / "store"]
        yield ["--repository", self.folder / "repository", "--state", self.folder / "state"]

    @property
    def store(self) -> Store:
        return Store(self.folder / "store")

    @property
    def manager(self) -> Manager:
        return Manager.open(self.folder / "repository", self.folder / "state")
