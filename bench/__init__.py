"""`hplm bench NAME`: measures this machine, always beside a baseline in the same run.

`bench/NAME.py` has the function NAME, which yields the figures. A new benchmark is one more file: docs/extending.md has the
recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from hplm.errors import HplmError, InvalidInput


def register(hplm: App) -> None:
    """Registered as the entry point `bench` of the group `hplm.commands`."""
    about = "Measure the speed of this machine, beside baselines."
    bench = App(name="bench", help=about, help_flags=(), version_flags=())  # each benchmark has its own: `bench.run`

    @bench.default
    def run(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> tuple[None, int]:
        return None, start("hplm bench", __name__, __path__, words)

    hplm.command(bench)


def start(command: str, package: str, folders: Iterable[str], words: Sequence[str]) -> int:
    """Runs the benchmark of the package that the first word names, or lists all. Returns the exit status."""
    known = benchmarks(command, folders)
    name, *words = words or ["--help"]
    if name in ("--help", "-h"):
        print(f"usage: {command} WHAT [OPTIONS]\n\nPrints figures beside their baselines. WHAT --help shows its options.\n")
        print("\n".join(f"  {name:12}{about}" for name, about in known.items()))
        return 0
    if name not in known:
        raise InvalidInput(f"there is no benchmark {name!r}: choose one of {', '.join(known)}")
    try:
        from bench.run import run

        return run(f"{command} {name}", package, name, words)
    except ModuleNotFoundError as error:
        way_out = "run `pip install -c constraints.txt -e '.[bench]' -e clients` in the checkout"
        raise HplmError(f"the package {error.name} is missing: {way_out}") from error


def benchmarks(command: str, folders: Iterable[str]) -> dict[str, str]:
    """Returns what each benchmark says of itself, without importing it. The other files of the folders serve them."""
    about = {}
    for file in sorted(file for folder in folders for file in Path(folder).glob("*.py")):
        begins, (first, *_) = f'"""`{command} {file.stem}`: ', file.read_text("utf-8").split("\n", 1)
        if first.startswith(begins):
            about[file.stem] = first.removeprefix(begins).removesuffix('"""')
    return about
