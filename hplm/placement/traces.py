"""Reads traces: our own records (`records.py`), and Azure's traces of serverless functions.

`units` gives each name in a file, of a unit or a tenant, its unit. Functions of Azure's traces have no tenants: they are
striped over the units in order.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hplm.arrays import Array
from hplm.errors import MISFITS, InvalidInput
from hplm.placement.profile import Profile
from hplm.placement.records import Units, is_journal, read_journals, read_recorded
from hplm.placement.units import Unit, unit_names
from hplm.placement.workload import MOST_S, Trace
from hplm.simulate.arrivals import SECOND, Lengths

MINUTES = 1440  # columns of a file of Azure's trace of 2019: a day
FUNCTIONS_2019 = ("HashOwner", "HashApp", "HashFunction", "Trigger")
FUNCTIONS_2021 = ("app", "func", "end_timestamp", "duration")
LENGTHS = Lengths(64, 400, 3, 512)  # of the texts of a trace that has none


def units_by_name(profile: Profile, units: Sequence[Unit]) -> dict[str, str]:
    """Returns the unit of each name that a trace may have: backbone/tenant, a tenant's where only one has it, or a unit's."""
    of_tenants = unit_names(profile, units)
    times = Counter(tenant for _, tenant in of_tenants)
    found: dict[str, str] = {}
    for (backbone, tenant), unit in of_tenants.items():
        found[f"{backbone}/{tenant}"] = unit
        if times[tenant] == 1:
            found[tenant] = unit
    return {**{unit.name: unit.name for unit in units if unit.name not in found}, **found}


def read_trace(paths: Sequence[Path], units: Mapping[str, str], lengths: Lengths = LENGTHS, seed: int = 0) -> Trace:
    """Reads one file of any of the four kinds, or several journals. The first line of a file tells its kind.

    `lengths` are for Azure's traces.
    """
    path, given = paths[0], Units(units)
    first = {own: _first_line(own) for own in paths}
    if len(paths) > 1:
        other = next((own for own in paths if not is_journal(own)), None)
        if other is not None:
            raise InvalidInput(f"{other} is no journal: of other traces give one file")
        return read_journals(paths, given)
    if first[path].startswith(",".join(FUNCTIONS_2019)):
        return _striped(_minutes(path, np.random.default_rng(seed)), given.names, lengths, seed, f"Azure 2019, {path}")
    if first[path].startswith(",".join(FUNCTIONS_2021)):
        return _striped(_invocations(path), given.names, lengths, seed, f"Azure 2021, {path}")
    return read_journals(paths, given) if is_journal(path) else read_recorded(path, given)


def _first_line(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline()
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not a text file: unpack it, if it is packed") from None


def _minutes(path: Path, rng: np.random.Generator) -> list[Array]:
    """Returns each function's arrivals: so many in each minute, evenly at random within it."""
    functions: list[Array] = []
    for line, row in _table(path):
        try:
            counts = np.array([int(row[str(minute)] or 0) for minute in range(1, MINUTES + 1)])
            minute = np.repeat(np.arange(MINUTES), counts)
        except MISFITS as error:
            raise InvalidInput(f"{path}, line {line} is not a function's day ({error!r}): see docs/placement.md") from None
        functions.append(np.sort(((minute + rng.random(len(minute))) * 60 * SECOND).astype(np.int64)))
    return functions


def _invocations(path: Path) -> list[Array]:
    """Returns each function's arrivals: an invocation's end less its duration, both in seconds."""
    functions: dict[tuple[str, str], list[float]] = {}
    for line, row in _table(path):
        try:
            start = float(row["end_timestamp"]) - float(row["duration"])
            if not abs(start) < MOST_S:
                raise ValueError(f"it starts at {start:g} s")
        except MISFITS as error:
            raise InvalidInput(f"{path}, line {line} is not an invocation ({error!r}): see docs/placement.md") from None
        functions.setdefault((row["app"], row["func"]), []).append(start)
    return [(np.sort(starts) * SECOND).astype(np.int64) for starts in functions.values()]


def _table(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from enumerate(csv.DictReader(file), 2)


def _striped(functions: Sequence[Array], names: tuple[str, ...], lengths: Lengths, seed: int, source: str) -> Trace:
    """Gives function i to unit i modulo the number of units."""
    arrival = np.concatenate([np.empty(0, np.int64), *functions])
    unit = np.repeat(np.arange(len(functions)) % len(names), list(map(len, functions)))
    order = np.argsort(arrival, kind="stable")
    tokens = lengths.draw(len(arrival), np.random.default_rng(seed))
    begins = int(arrival.min(initial=np.iinfo(np.int64).max))
    return Trace(names, arrival[order] - begins, unit[order], tokens, np.zeros(len(arrival), np.int64), source)
