"""`hplm bench NAME`: measures this machine, always beside a baseline in the same run.

`bench/NAME.py` has the function NAME, which yields the figures. A new benchmark is one more file: docs/extending.md has the
recipe.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from hplm.errors import HplmError, InvalidInput

# These files are not benchmarks.
SUPPORT = {
    "__init__",
    "alpaserve",
    "claims",
    "cold",
    "decoders",
    "machine",
    "picture",
    "place_served",
    "rows",
    "run",
    "server",
    "turns",
}


def register(commands: argparse._SubParsersAction) -> None:
    """Registered as the entry point `bench` of the group `hplm.commands`."""
    # The prefix "\0" makes argparse read options as words. `bench.run` reads them, because each benchmark has its own.
    about = "measure the speed of this machine, beside baselines"
    bench = commands.add_parser("bench", help=about, add_help=False, prefix_chars="\0")
    bench.add_argument("words", nargs="*")
    bench.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    files = benchmarks()
    name, *words = args.words or ["--help"]
    if name in ("--help", "-h"):
        print("usage: hplm bench WHAT [OPTIONS]\n\nMeasures this machine, beside baselines. WHAT --help shows its options.\n")
        print("\n".join(f"  {name:12}{_about(file)}" for name, file in files.items()))
        return
    if name not in files:
        raise InvalidInput(f"there is no benchmark {name!r}: choose one of {', '.join(files)}")
    try:
        from bench.run import run
    except ModuleNotFoundError as error:
        way_out = "run `pip install -c constraints.txt -e '.[bench]'` in the checkout"
        raise HplmError(f"the package {error.name} is missing: {way_out}") from None
    args.status = run(name, words)


def benchmarks() -> dict[str, Path]:
    """Returns the files of the benchmarks by name."""
    files = [file for folder in __path__ for file in Path(folder).glob("*.py")]
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem) if file.stem not in SUPPORT}


def _about(file: Path) -> str:
    """Returns what a benchmark says of itself in its first line, without importing it."""
    return (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0].partition(": ")[2]
