"""What other packages register with hplm, as Python entry points. What is registered may not be installed.

hplm.commands   NAME = function(commands): adds the command `hplm NAME` to argparse's subparsers
hplm.schemes    NAME = function(store, repository, options, NAME, resident, replace): `hplm export --scheme NAME`
hplm.rivals     NAME = function(store, evaluation, names, device, train_file, dev_file): `hplm evaluate --against NAME`;
                scores by name; called once for all names that have the same function
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hplm.errors import HplmError, InvalidInput

COMMANDS, SCHEMES, RIVALS = "hplm.commands", "hplm.schemes", "hplm.rivals"


def registered(group: str) -> dict[str, EntryPoint]:
    """By name. Nothing is imported."""
    return {point.name: point for point in sorted(entry_points(group=group))}


def load(point: EntryPoint, what: str) -> Any:
    """The registered object; `what` names it in errors, such as "`hplm bench`"."""
    package = point.module.partition(".")[0]
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and f"{point.module}.".startswith(f"{error.name}."):
            message = f"{what} is in the package `{package}`, which is not installed here: {_way_out(point, package)}"
        else:
            message = f"{what} cannot be loaded from {point.value!r}: {error}"
        raise HplmError(message) from error


def chosen(group: str, name: str, option: str, ours: Sequence[str] = ()) -> Any:
    """What is registered under the name that an option was given; `ours`: names that need no registration."""
    points = registered(group)
    if name not in points:
        raise InvalidInput(f"{option} {name!r} is not known: choose from {', '.join([*ours, *points])}")
    return load(points[name], f"{option} {name!r}")


def _way_out(point: EntryPoint, package: str) -> str:
    """Where an extra has the package's name, that brings what the package needs."""
    project, extras = package, []
    if point.dist is not None:
        project, extras = point.dist.name, point.dist.metadata.get_all("Provides-Extra", [])
    return f"take a checkout of {project} and `pip install -e '.{f'[{package}]' if package in extras else ''}'`"
