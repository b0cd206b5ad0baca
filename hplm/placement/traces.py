"""Reads traces, JSONL: recorded ones, and journals of one server or of several."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from hplm.errors import MISFITS, InvalidInput
from hplm.placement.workload import MOST_NS, LeftOut, Trace
from hplm.simulate.arrivals import MILLISECOND, SECOND

LONGEST = 1 << 20  # tokens of a text, and texts of a request
OF_JOURNALS = ("wall", "arrived", "stages")  # keys of a journal's lines: "stages" of a batch, the others of a request

Object = dict[str, Any]  # of JSON
Text = tuple[int, int, int, int]  # arrival, unit, tokens and timeout


def read_trace(paths: Sequence[Path], by_name: Mapping[str, str]) -> Trace:
    """Reads a recorded trace, or journals. `by_name`: the unit of each name in a file, of a unit or a tenant."""
    other = next((path for path in paths if not _is_journal(path)), None)
    if other is None:
        return _read_journals(paths, by_name)
    if len(paths) > 1:
        raise InvalidInput(f"{other} is no journal: of other traces give one file")
    return _read_recorded(other, by_name)


def _is_journal(path: Path) -> bool:
    """Whether a file's first object is a journal's line. The journal of a server without requests is empty."""
    if not path.is_file():
        raise InvalidInput(f"--trace {path} is no file: name one (a pipe cannot be read twice)")
    first = next((row for _, row in _lines(path) if row is not None), None)
    return path.stat().st_size == 0 or (first is not None and any(key in first for key in OF_JOURNALS))


def _read_recorded(path: Path, by_name: Mapping[str, str]) -> Trace:
    """Reads lines of `arrival` (seconds), `tokens`, `tenant` or `unit`, and optionally `deadline_ms`, in order."""
    units = _numbers(by_name)

    def unit_of(row: Object) -> int:
        name = str(row.get("unit", row.get("tenant", "")))
        unit = name if "unit" in row and name in units else by_name.get(name)
        if unit is None:
            raise InvalidInput(
                f"tenant {name!r} is not in the profile: if it is new, measure again with `hplm place profile`; else name "
                f"tenants as backbone/tenant, or units, such as {', '.join([*units][:5])}"
            )
        return units[unit]

    def texts_of(row: Object | None) -> list[Text]:
        if row is None:
            raise InvalidInput("it is no JSON object: see docs/placement.md")
        timeout_ns = int(float(row.get("deadline_ms", 0)) * MILLISECOND)
        arrival_ns, tokens = int(float(row["arrival"]) * SECOND), int(row["tokens"])
        _check(arrival_ns, tokens, timeout_ns)
        return [(arrival_ns, unit_of(row), tokens, timeout_ns)]

    return _trace(_texts(path, texts_of), units, f"recorded, {path}")


def _read_journals(paths: Sequence[Path], by_name: Mapping[str, str]) -> Trace:
    """Reads the requests of all journals in the order of the wall clock.

    Requests of tenants that have no unit are in `left_out`: servers answer tenants that were added after the profile, and
    journals keep those that were deleted. Broken lines are those that a killed server began, or a running one has begun.
    """
    units = _numbers(by_name)
    unknown: list[str] = []
    broken = 0

    def texts_of(row: Object | None) -> list[Text]:
        nonlocal broken
        if row is None:
            broken += 1
            return []
        if "arrived" not in row:
            return []
        if "wall" not in row:
            raise InvalidInput(
                "this request has no time of day (`wall`), as in journals of earlier versions: let servers of this version "
                "write a new journal, or give only the lines of this one that have both `wall` and `arrived`"
            )
        count, tenant = int(row["texts"]), f"{row['backbone']}/{row['tenant']}"
        timeout_ns = round((float(row["deadline"]) - float(row["arrived"])) * SECOND) if row["deadline"] else 0
        tokens = max(1, round(int(row["tokens"]) / max(1, count)))  # a journal has the sum of all texts
        arrival_ns = round(float(row["wall"]) * SECOND)
        _check(arrival_ns, max(tokens, count), timeout_ns)
        if tenant not in by_name:
            unknown.extend([tenant] * count)
            return []
        return [(arrival_ns, units[by_name[tenant]], tokens, timeout_ns)] * count

    texts = sorted(text for path in paths for text in _texts(path, texts_of))
    skipped = f" without {broken:,} broken lines" if broken else ""
    return _trace(texts, units, f"journal, {', '.join(map(str, paths))}{skipped}", unknown)


def _numbers(by_name: Mapping[str, str]) -> dict[str, int]:
    """Returns the number of each unit by its name."""
    return {unit: number for number, unit in enumerate(dict.fromkeys(by_name.values()))}


def _texts(path: Path, texts_of: Callable[[Object | None], list[Text]]) -> list[Text]:
    """Returns the texts of all lines of a file. An error names the line."""
    texts: list[Text] = []
    for number, row in _lines(path):
        try:
            texts += texts_of(row)
        except InvalidInput as error:
            raise InvalidInput(f"{path}, line {number}: {error}") from None
        except MISFITS as error:
            raise InvalidInput(f"{path}, line {number} is not a recorded request ({error!r}): see docs/placement.md") from None
    return texts


def _lines(path: Path) -> Iterator[tuple[int, Object | None]]:
    """Yields the number of each line, and its object, or None where it is no JSON object."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield number, cast("Object", row) if isinstance(row, dict) else None


def _check(arrival_ns: int, tokens: int, timeout_ns: int) -> None:
    if not 1 <= tokens <= LONGEST or timeout_ns < 0:
        raise InvalidInput(
            f"{tokens} tokens and {timeout_ns / 1e6:g} ms until the deadline: give 1 to {LONGEST} tokens, and 0 ms or more"
        )
    if max(abs(arrival_ns), timeout_ns) > MOST_NS:
        raise InvalidInput(f"a time of {max(abs(arrival_ns), timeout_ns) / SECOND:g} s has more than 64 bits: correct it")


def _trace(texts: Sequence[Text], units: Mapping[str, int], source: str, unknown: Sequence[str] = ()) -> Trace:
    """Returns a trace that begins at 0. `unknown`: the tenants of the requests that it leaves out."""
    arrival_ns, unit, tokens, timeout_ns = np.array(texts, np.int64).reshape(-1, 4).T
    begins = texts[0][0] if texts else 0
    left_out = LeftOut(unknown)
    if not texts:
        left_out.expect_few(0, source)
    return Trace(tuple(units), arrival_ns - begins, unit, tokens, timeout_ns, source, left_out)
