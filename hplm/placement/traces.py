"""Reads traces, JSONL: recorded ones, and journals of one server or of several.

The times of a journal are of its machine's monotonic clock. Lines with the wall clock, which come before, say when that was.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from hplm.arrays import Array
from hplm.errors import MISFITS, InvalidInput
from hplm.placement.left_out import LeftOut
from hplm.placement.profile import Profile
from hplm.placement.units import Unit, unit_names
from hplm.placement.workload import Trace
from hplm.simulate.arrivals import MILLISECOND, SECOND

BACK_S = 60.0  # lines of a journal are in the order of the answers, but for less than this
LONGEST = 1 << 20  # tokens of a text
OF_JOURNALS = ("wall", "arrived", "stages")  # keys of lines: of the wall clock, a request, a batch

Row = tuple[int, int, int, int]  # arrival, unit, tokens and timeout of a text


class Units:
    """The units of a trace, by their names and by those of their tenants."""

    def __init__(self, by_name: Mapping[str, str]) -> None:
        self.names = tuple(dict.fromkeys(by_name.values()))
        self._by_name = by_name
        self._number = {name: number for number, name in enumerate(self.names)}
        self._unknown: dict[str, int] = {}

    @property
    def unknown(self) -> tuple[str, ...]:
        """The tenants without a unit that `of_any` was given. Their numbers are -1, -2 and so on."""
        return tuple(self._unknown)

    def named(self, name: str) -> int:
        """Returns the number of a unit."""
        return self._number[name] if name in self._number else self.of_tenant(name)

    def of_tenant(self, name: str) -> int:
        """Returns the number of the unit of a tenant."""
        if name not in self._by_name:
            raise InvalidInput(
                f"tenant {name!r} is not in the profile: if it is new, measure again with `hplm place profile`; else name "
                f"tenants as backbone/tenant, or units, such as {', '.join(self.names[:5])}"
            )
        return self._number[self._by_name[name]]

    def of_any(self, name: str) -> int:
        """Returns the number of a tenant's unit, or the negative number of a tenant without one."""
        if name in self._by_name:
            return self._number[self._by_name[name]]
        return self._unknown.setdefault(name, -1 - len(self._unknown))


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


def read_trace(paths: Sequence[Path], by_name: Mapping[str, str]) -> Trace:
    """Reads a recorded trace, or journals. `by_name`: the unit of each name in a file, of a unit or a tenant."""
    units, other = Units(by_name), next((path for path in paths if not is_journal(path)), None)
    if other is None:
        return read_journals(paths, units)
    if len(paths) > 1:
        raise InvalidInput(f"{other} is no journal: of other traces give one file")
    return read_recorded(other, units)


def is_journal(path: Path) -> bool:
    """Whether a file's first line is that of a journal."""
    return any(any(key in row for key in OF_JOURNALS) for _, row in islice(_lines(path, []), 1))


def read_recorded(path: Path, units: Units) -> Trace:
    """Reads lines of `arrival` (seconds), `tokens`, `tenant` or `unit`, and optionally `deadline_ms`, in order."""

    def rows_of(row: Mapping[str, Any]) -> list[Row]:
        unit = units.named(str(row["unit"])) if "unit" in row else units.of_tenant(str(row.get("tenant", "")))
        timeout = int(float(row.get("deadline_ms", 0)) * MILLISECOND)
        return [_checked(int(float(row["arrival"]) * SECOND), unit, int(row["tokens"]), timeout)]

    source = f"recorded, {path}"
    return _trace(_columns(_rows(path, rows_of, []), source), units, source)


def read_journals(paths: Sequence[Path], units: Units) -> Trace:
    """Reads the requests of all journals together. Each one of several has the wall clock, or their order is not known.

    Requests of tenants that have no unit are in `left_out`: servers answer tenants that were added after the profile, and
    journals keep those that were deleted.
    """
    rows: list[Row] = []
    halves: list[int] = []
    for path in paths:
        rows += _rows(path, Journal(units, len(paths) == 1).rows_of, halves, is_growing=True)
    left_out = f" without {len(halves):,} half lines of killed servers" if halves else ""
    source = f"journal, {', '.join(map(str, paths))}{left_out}"
    columns = _columns(rows, source)
    in_order = np.argsort(columns[:, 0], kind="stable")  # lines of journals are in the order of the answers
    return _trace(columns[in_order], units, source)


class Journal:
    """Reads the lines of one journal in order."""

    def __init__(self, units: Units, is_alone: bool) -> None:
        self._units = units
        self._is_alone = is_alone
        self._behind_ns: int | None = None  # how far the monotonic clock is behind the wall clock
        self._latest = -math.inf
        self._has_requests = False

    def rows_of(self, row: Mapping[str, Any]) -> list[Row]:
        """Returns the texts of a request, and none of other lines."""
        if "wall" in row:
            self._set(round((float(row["wall"]) - float(row["clock"])) * SECOND))
        if "arrived" not in row:
            return []
        self._has_requests = True
        arrived = float(row["arrived"])
        self._check_clock(float(row.get("answered", arrived)))
        tenant = str(row["tenant"])
        unit = self._units.of_any(f"{row['backbone']}/{tenant}") if "backbone" in row else self._units.of_tenant(tenant)
        texts = int(row["texts"])
        timeout = round((float(row["deadline"]) - arrived) * SECOND) if row["deadline"] else 0
        tokens = max(1, round(int(row["tokens"]) / max(1, texts)))  # a journal has the sum of all texts
        at = round(arrived * SECOND) + (self._behind_ns or 0)
        return [_checked(at, unit, tokens, timeout)] * texts

    def _set(self, behind_ns: int) -> None:
        if self._behind_ns is None and self._has_requests:
            raise InvalidInput(
                "this line is the first one with the wall clock, but requests come before it: begin the file with this line, "
                "and give those before it by themselves"
            )
        self._behind_ns, self._latest = behind_ns, -math.inf

    def _check_clock(self, answered: float) -> None:
        if self._behind_ns is None and not self._is_alone:
            raise InvalidInput(
                "no line with the wall clock comes before it, so its place among other journals is not known: begin the file "
                "with such a line. Journals of older versions have none: give each by itself"
            )
        if answered < self._latest - BACK_S:
            raise InvalidInput(
                f"its clock runs back by {self._latest - answered:,.0f} s, and no line with the wall clock says why: give the "
                "lines of one start of the machine, in the order of the answers"
            )
        self._latest = max(self._latest, answered)


def _rows(
    path: Path, rows_of: Callable[[Mapping[str, Any]], list[Row]], halves: list[int], is_growing: bool = False
) -> list[Row]:
    rows: list[Row] = []
    for line, row in _lines(path, halves, is_growing):
        try:
            rows += rows_of(row)
        except InvalidInput as error:
            raise InvalidInput(f"{path}, line {line}: {error}") from None
        except MISFITS as error:
            raise InvalidInput(f"{path}, line {line} is not a recorded request ({error!r}): see docs/placement.md") from None
    return rows


def _lines(path: Path, halves: list[int], is_growing: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Passes over what a killed server has left before a line with the wall clock, and adds its lines to `halves`.

    `is_growing`: a server may write the last line just now, which is left out if it is not complete.
    """
    wrong: list[int] = []  # lines that are no objects, since the last one that is
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            row = _object(line)
            if row is None:
                if not (is_growing and not line.endswith(b"\n")):
                    wrong.append(number)
                continue
            if wrong and "wall" not in row:
                break
            halves += wrong
            wrong.clear()
            yield number, row
    if wrong:
        raise InvalidInput(f"{path}, line {wrong[0]} is no JSON object: see docs/placement.md")


def _object(line: bytes) -> dict[str, Any] | None:
    """Returns None of a line that is no JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", row) if isinstance(row, dict) else None


def _checked(arrival: int, unit: int, tokens: int, timeout: int) -> Row:
    if not 1 <= tokens <= LONGEST or timeout < 0:
        raise InvalidInput(
            f"{tokens} tokens and {timeout / 1e6:g} ms until the deadline: give 1 to {LONGEST} tokens, and 0 ms or more"
        )
    return arrival, unit, tokens, timeout


def _columns(rows: Sequence[Row], source: str) -> Array:
    try:
        return np.array(rows, np.int64).reshape(-1, 4)
    except OverflowError:
        raise InvalidInput(f"{source}: a number has more than 64 bits: correct it") from None


def _trace(columns: Array, units: Units, source: str) -> Trace:
    """Returns a trace that begins at 0."""
    is_known = columns[:, 1] >= 0
    arrival, unit, tokens, timeout = columns[is_known].T
    begins = int(arrival[0]) if len(arrival) else 0
    unknown_at, unknown = columns[~is_known, :2].T
    left_out = LeftOut(units.unknown, unknown_at - begins, -1 - unknown)
    if not len(arrival):
        left_out.expect_few(0, source)
    return Trace(units.names, arrival - begins, unit, tokens, timeout, source, left_out)
