"""Reads traces: our journals, our recorded traces, and Azure's traces of serverless functions.

`units` gives each name in a file, of a unit or a tenant, its unit. Functions of Azure's traces have no tenants: they are
striped over the units in order.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hplm.arrays import Array
from hplm.errors import MISFITS, InvalidInput
from hplm.placement.profile import Profile
from hplm.placement.units import Unit, unit_names
from hplm.placement.workload import MOST_S, Trace
from hplm.scheduling.simulation.arrivals import MILLISECOND, SECOND, Lengths

MINUTES = 1440  # columns of a file of Azure's trace of 2019: a day
FUNCTIONS_2019 = ("HashOwner", "HashApp", "HashFunction", "Trigger")
FUNCTIONS_2021 = ("app", "func", "end_timestamp", "duration")
BACK_S = 60.0  # lines of a journal are in the order of the answers, but for less than this
LONGEST = 1 << 20  # tokens of a text
LENGTHS = Lengths(64, 400, 3, 512)  # of the texts of a trace that has none


def units_by_name(profile: Profile, units: Sequence[Unit]) -> dict[str, str]:
    """Returns the unit of each name that a trace may have: a unit's, backbone/tenant, or a tenant's where only one has it."""
    found = {unit.name: unit.name for unit in units}
    of_tenants = unit_names(profile, units)
    times = Counter(tenant for _, tenant in of_tenants)
    for (backbone, tenant), unit in of_tenants.items():
        found.setdefault(f"{backbone}/{tenant}", unit)
        if times[tenant] == 1:
            found.setdefault(tenant, unit)
    return found


def read_trace(path: Path, units: Mapping[str, str], lengths: Lengths = LENGTHS, seed: int = 0) -> Trace:
    """Reads a file of any of the four kinds, which its first line tells apart. `lengths` are for Azure's traces."""
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not a text file: unpack it, if it is packed") from None
    names = tuple(dict.fromkeys(units.values()))
    if first.startswith(",".join(FUNCTIONS_2019)):
        return _striped(_minutes(path, np.random.default_rng(seed)), names, lengths, seed, f"Azure 2019, {path}")
    if first.startswith(",".join(FUNCTIONS_2021)):
        return _striped(_invocations(path), names, lengths, seed, f"Azure 2021, {path}")
    return _recorded(path, units, names)


def _recorded(path: Path, units: Mapping[str, str], names: tuple[str, ...]) -> Trace:
    """Reads JSONL: a journal, or lines of `arrival` (seconds), `tokens`, `tenant` or `unit`, and optionally `deadline_ms`."""
    number = {name: index for index, name in enumerate(names)}
    rows: list[tuple[int, ...]] = []
    journal, clock = False, -math.inf
    for line, row in _lines(path):
        try:
            journal = journal or "arrived" in row
            if "arrived" in row:
                clock = _later(clock, float(row.get("answered", row["arrived"])))
                rows += _journal_rows(row, number[_unit_of(row, units)])
            elif not journal:
                rows.append(_row(row, number[_unit_of(row, units)]))
        except InvalidInput as error:
            raise InvalidInput(f"{path}, line {line}: {error}") from None
        except MISFITS as error:
            raise InvalidInput(f"{path}, line {line} is not a recorded request ({error!r}): see docs/placement.md") from None
    try:
        columns = np.array(rows, np.int64).reshape(-1, 4)
    except OverflowError:
        raise InvalidInput(f"{path} has a number of more than 64 bits: correct it") from None
    if journal:  # its lines are in the order of the answers
        columns = columns[np.argsort(columns[:, 0], kind="stable")]
    if len(columns):
        columns[:, 0] -= columns[0, 0]
    arrival, unit, tokens, timeout = columns.T
    return Trace(names, arrival, unit, tokens, timeout, f"{'journal' if journal else 'recorded'}, {path}")


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise InvalidInput(f"{path}, line {number} is no JSON object: see docs/placement.md")
            yield number, row


def _unit_of(row: Mapping[str, Any], units: Mapping[str, str]) -> str:
    name = str(row.get("unit", row.get("tenant", "")))
    if name not in units:
        known = ", ".join(list(dict.fromkeys(units.values()))[:5])
        raise InvalidInput(f"tenant {name!r} is not in the profile: name tenants as backbone/tenant, or units, such as {known}")
    return units[name]


def _row(row: Mapping[str, Any], unit: int) -> tuple[int, int, int, int]:
    timeout = int(float(row.get("deadline_ms", 0)) * MILLISECOND)
    return _checked(int(float(row["arrival"]) * SECOND), unit, int(row["tokens"]), timeout)


def _journal_rows(row: Mapping[str, Any], unit: int) -> list[tuple[int, int, int, int]]:
    """Returns the texts of a request: a journal has the sum of their tokens."""
    texts, arrived = int(row["texts"]), float(row["arrived"])
    timeout = round((float(row["deadline"]) - arrived) * SECOND) if row["deadline"] else 0
    each = _checked(round(arrived * SECOND), unit, max(1, round(int(row["tokens"]) / max(1, texts))), timeout)
    return [each] * texts


def _later(clock: float, answered: float) -> float:
    """Returns the latest time of a journal so far. Refuses one whose clock has begun anew."""
    if answered < clock - BACK_S:
        raise InvalidInput(
            f"its clock runs back by {clock - answered:,.0f} s: after a restart of the machine a journal has another clock. "
            "Give the lines of one boot, in the order of the answers"
        )
    return max(clock, answered)


def _checked(arrival: int, unit: int, tokens: int, timeout: int) -> tuple[int, int, int, int]:
    if not 1 <= tokens <= LONGEST or timeout < 0:
        raise InvalidInput(
            f"{tokens} tokens and {timeout / 1e6:g} ms until the deadline: give 1 to {LONGEST} tokens, and 0 ms or more"
        )
    return arrival, unit, tokens, timeout


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
