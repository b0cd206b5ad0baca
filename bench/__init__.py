"""`hplm bench NAME`: measures this machine, always beside a baseline in the same run.

`bench/NAME.py` has the function NAME, which yields the figures. A new benchmark is one more file: docs/extending.md has the
recipe.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hplm.errors import HplmError, InvalidInput


def register(commands: argparse._SubParsersAction) -> None:
    """Registered as the entry point `bench` of the group `hplm.commands`."""
    # The prefix "\0" makes argparse read options as words. `bench.run` reads them, because each benchmark has its own.
    about = "measure the speed of this machine, beside baselines"
    bench = commands.add_parser("bench", help=about, add_help=False, prefix_chars="\0")
    bench.add_argument("words", nargs="*")
    bench.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    known = benchmarks()
    name, *words = args.words or ["--help"]
    if name in ("--help", "-h"):
        print("usage: hplm bench WHAT [OPTIONS]\n\nMeasures this machine, beside baselines. WHAT --help shows its options.\n")
        print("\n".join(f"  {name:12}{about}" for name, about in known.items()))
        return
    if name not in known:
        raise InvalidInput(f"there is no benchmark {name!r}: choose one of {', '.join(known)}")
    try:
        from bench.run import run

        args.status = run(name, words)
    except ModuleNotFoundError as error:
        way_out = "run `pip install -c constraints.txt -e '.[bench]' -e clients` in the checkout"
        raise HplmError(f"the package {error.name} is missing: {way_out}") from error


def benchmarks() -> dict[str, str]:
    """Returns what each benchmark says of itself, without importing it. The other files of the folder serve them."""
    about = {}
    for file in sorted(file for folder in __path__ for file in Path(folder).glob("*.py")):
        begins, (first, *_) = f'"""`hplm bench {file.stem}`: ', file.read_text("utf-8").split("\n", 1)
        if first.startswith(begins):
            about[file.stem] = first.removeprefix(begins).removesuffix('"""')
    return about
