"""`hplm bench`: measures this machine, always beside a baseline in the same run. Each benchmark has its own file.

A new benchmark is one more file in this folder: docs/extending.md has the recipe.
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
