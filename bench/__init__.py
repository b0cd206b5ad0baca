"""`hplm bench`: measures this machine, always beside a baseline in the same run. Each benchmark has its own file.

A new benchmark is one more file in this folder. It needs two functions:

    register(kinds)     adds the command and its options: see `bench.options.benchmark`
    run(args) -> dict   measures, prints a table unless --json is given, and returns the figures

Imports of torch and the like belong inside `run`, because `hplm --help` imports every file of this folder. Long measuring
code lives in a file of the same name in `bench/measuring`.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil


def register(commands: argparse._SubParsersAction) -> None:
    """Registered as the entry point `bench` of the group `hplm.commands`."""
    bench = commands.add_parser("bench", help="measure the speed of this machine, beside baselines")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="WHAT")
    for file in sorted(file.name for file in pkgutil.iter_modules(__path__) if not file.ispkg):
        module = importlib.import_module(f"{__name__}.{file}")
        if hasattr(module, "register"):  # `options` is not a benchmark
            module.register(kinds)
