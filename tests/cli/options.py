"""`python -m tests.cli.options`: prints how many options each command has, benchmarks too. --help is not counted."""

from __future__ import annotations

from functools import reduce
from operator import getitem

from cyclopts import App

import bench
from bench.run import of
from hplm.cli.main import application
from tests.cli.commands import leaves


def options_of(app: App) -> list[str]:
    """Returns the names of a command's options."""
    arguments = app.assemble_argument_collection(parse_docstring=True)
    return [one.name for one in arguments if one.parse and not one.children and one.name.startswith("-")]


def all_options() -> dict[str, list[str]]:
    """Returns the options of each command."""
    known, top = leaves(), application()
    found = {" ".join(words): options_of(reduce(getitem, words, top)) for words in known if words != ("bench",)}
    for name in bench.benchmarks("hplm bench", bench.__path__):
        found[f"bench {name}"] = options_of(of(f"hplm bench {name}", "bench", name)[1])
    return found


if __name__ == "__main__":
    found = all_options()
    for command, names in found.items():
        print(f"{len(names):4}  {command}")
    print(f"{sum(map(len, found.values())):4}  in {len(found)} commands")
