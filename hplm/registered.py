"""Finds the extensions that other packages register as Python entry points. A package may be registered but not installed.

hplm.commands   NAME = function(app): adds the command `hplm NAME` to the `cyclopts.App` of all commands
hplm.build      VERB or NOUN.VERB = function: a command of a store, imported when it runs
hplm.stores     NAME = what commands take of the builder where they are given a store: `of_stores`
hplm.rivals     NAME = function(store, evaluation, runs, device, train_file, dev_file): `hplm evaluate --against NAME`;
                yields the answers of each run, a NAME and a seed; called once for all names with the same function
hplm.policies   NAME = function(**options): returns a `hplm.scheduling.policy.Policy`
hplm.packings   NAME = function(measure, **options): returns a `hplm.engine.packing.Packing`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hplm.errors import HplmError, InvalidInput

COMMANDS, RIVALS = "hplm.commands", "hplm.rivals"
BUILDING, STORES = "hplm.build", "hplm.stores"
POLICIES, PACKINGS = "hplm.policies", "hplm.packings"


def registered(group: str) -> dict[str, EntryPoint]:
    """Returns the entry points of a group by name, without importing them."""
    return {point.name: point for point in sorted(entry_points(group=group))}


def load(point: EntryPoint, what: str) -> Any:
    """Returns the registered object. `what` is its name in errors, such as "`hplm bench`"."""
    package = point.module.partition(".")[0]
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and f"{point.module}.".startswith(f"{error.name}."):
            message = f"{what} is in the package `{package}`, which is not installed here: {_way_out(point, package)}"
        else:
            message = f"{what} cannot be loaded from {point.value!r}: {error}"
        raise HplmError(message) from error


def chosen(group: str, name: str, option: str, ours: Iterable[str] = ()) -> Any:
    """Returns the object that is registered under the value of an option. `ours` are names that need no registration."""
    points = registered(group)
    if name not in points:
        raise InvalidInput(f"unknown {option} {name!r}: choose from {', '.join([*ours, *points])}")
    return load(points[name], f"{option} {name!r}")


def of_stores(name: str) -> Any:
    """Returns what is registered for stores under this name. Raises ModuleNotFoundError if the builder is not installed."""
    return registered(STORES)[name].load()


def made(group: str, given: str, option: str, ours: Mapping[str, str], *arguments: object) -> Any:
    """Makes an object from a name and options, such as `das:eta=0.5,rows=16`.

    `ours` has the places of those that need no registration, and cannot be replaced: their names mean the same everywhere.
    """
    name, _, options = given.partition(":")
    kind = EntryPoint(name, ours[name], group).load() if name in ours else chosen(group, name, option, ours)
    try:
        return kind(*arguments, **_options(options, option))
    except TypeError as error:
        raise InvalidInput(f"{option} {given!r}: {error}") from error


def _options(given: str, option: str) -> dict[str, int | float | str]:
    options: dict[str, int | float | str] = {}
    for part in filter(None, given.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise InvalidInput(f"{option} option {part!r} has no value: write name=value, and separate options by commas")
        options[name.strip()] = _value(value.strip())
    return options


def _value(given: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(given)
        except ValueError:
            continue
    return given


def _way_out(point: EntryPoint, package: str) -> str:
    """Returns how to install the package. An extra with the package's name installs its dependencies too."""
    project, extras = package, []
    if point.dist is not None:
        project, extras = point.dist.name, point.dist.metadata.get_all("Provides-Extra", [])
    return f"take a checkout of {project} and `pip install -e '.{f'[{package}]' if package in extras else ''}'`"
