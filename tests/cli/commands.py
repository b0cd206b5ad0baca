"""Runs commands in this process or in another one, and a store with an export and a live state for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


# Reads commands as JSON and writes exit code, output and errors of each.
RUN = """
import contextlib, io, json, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from hplm.cli.main import main
from hplm.tenants import state_folder
state_folder.UNSEEN_SECONDS = 0.0  # as in tests/support/shared.py
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(json.loads(line))
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


@contextmanager
def process_without(
    *packages: str, python: object = sys.executable, cwd: Path = Path(__file__).parents[2], **environment: str
) -> Iterator[Callable[[Sequence[str]], tuple[int, str, str]]]:
    """Starts a process without these packages. Yields what runs a command there: it returns exit code, output and errors."""
    piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command, variables = [str(python), "-c", RUN, *packages], {**os.environ, **environment}
    with subprocess.Popen(command, cwd=cwd, env=variables, **piped) as process:

        def run(words: Sequence[str]) -> tuple[int, str, str]:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps(words), file=process.stdin, flush=True)
            said = process.stdout.readline()
            assert said, f"the process has ended at {words}"
            return json.loads(said)

        yield run


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
