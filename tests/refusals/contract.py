"""The tables in the documents that say which values a parameter may have, and values that lie in and around them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
RANGE = re.compile(r"(.+?), (?:at least (\S+)|((?:above )?\S+) to (.+))")
LISTED = re.compile(r"up to ([\d,]+) (strings|token ids)(?: of (\d+) to (\d+) characters)?")
INFINITY = float("inf")
ODD = [
    None, True, False, 0, 1, -1, 2, 255, 2**15, 2**16, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, -(2**63) - 1, 10**30,
    10**400, 0.5, 1.0, -0.5, 1e-9, 1e308, INFINITY, -INFINITY, float("nan"),
    "", " ", "0", "1", "-1", "0.5", "1e9", "NaN", "Infinity", "true", "null", "\0", "水" * 40, "a" * 3000, "\ud800", "%s%n",
    [], [0], [1, 2], [True], ["x"], [""], ["x", 1], [None], [[]], {}, {"1": 1}, {"1": "x"}, {"1": None}, {"x": 1}, {"-1": 1},
    {"": 1}, {"a": {"b": [{}]}},
]  # fmt: skip
POSITIONS, SHORT = "the model's positions", 384  # so many tokens are left for a prompt
MEANT = {POSITIONS: 16_384 - SHORT, "`max_tokens`": 2}  # words in the tables, for the model and requests of the tests


@dataclass(frozen=True)
class Row:
    """Holds what the line of a table says about one name."""

    name: str
    of: str  # the ways that take it, where a table has several
    type: str
    least: str = ""
    most: str = ""
    default: str = ""
    as_text: bool = False  # values are written into a file, as text
    or_text: bool = False  # a number, true or false may be text

    @property
    def setting(self) -> str | None:
        """The setting whose row says what is allowed."""
        if self.type == "the setting of this name":
            return self.name
        found = re.fullmatch(r"setting `(\w+)`", self.type)
        return found and found[1]

    def allows(self, value: Any) -> bool:
        """Whether a value of JSON is one that the table allows."""
        if self.or_text and isinstance(value, str) and self.type == "true or false":
            return value in ("true", "false", "0", "1")
        is_number = "number" in self.type.split(",")[0] and not LISTED.match(self.type)
        if (self.as_text or "as text" in self.type or (self.or_text and is_number)) and isinstance(value, str):
            is_one = NUMBER.fullmatch(value) or (self.as_text and value in ("true", "false"))
            value = json.loads(value) if is_one else value
            if self.or_text and isinstance(value, str) and value == "null":
                return self.default in ("none", "another for each request")
            if self.or_text and isinstance(value, float) and value.is_integer():  # 1e9
                value = int(value)
        if self.type == "anything":
            return True
        if self.type == "true or false":
            return isinstance(value, bool)
        if self.type == "whole number":
            return type(value) is int and self._holds(value)
        if self.type.startswith("number"):
            return (type(value) in (int, float) and self._holds(value)) or f", or {value}" == self.type[6:]
        if self.type == "a text or token ids, or a list of up to 128":
            prompts = value if isinstance(value, list) and not _are_ids(value) else [value]
            is_one = all(isinstance(prompt, str) for prompt in prompts) or all(map(_are_ids, prompts))
            return 0 < len(prompts) <= 128 and is_one
        found = LISTED.match(self.type)
        assert found, f"the type {self.type!r} of {self.name!r} is unknown here"
        most = number(found[1])
        if found[2] == "strings":
            given, fewest, longest = value if isinstance(value, list) else [value], int(found[3]), int(found[4])
            return len(given) <= most and all(isinstance(one, str) and fewest <= len(one) <= longest for one in given)
        if "each with a number" in self.type:
            return (
                isinstance(value, dict)
                and len(value) <= most
                and all(re.fullmatch("[0-9]+", token) and int(token) < VOCABULARY for token in value)
                and all(type(one) in (int, float) and self._holds(one) for one in value.values())
            )
        is_list = isinstance(value, list) and len(value) <= most
        return is_list and all(type(token) is int and 0 <= token < VOCABULARY for token in value)

    def _holds(self, value: float) -> bool:
        least, most = number(self.least or "-inf"), number(self.most or "inf")
        return (least < value if "above" in self.least else least <= value) and value <= most

    def values(self) -> list[Any]:
        """Returns odd values of every kind, and those at the ends of the range and just beyond them."""
        near: list[Any] = []
        for end in (self.least, self.most):
            if end:
                at, one = number(end), SHORT if end == POSITIONS else 1
                near += [at, at + one, at - one, float(at), at + 0.5, at - 0.5, str(at), [at], str(at + one)]
        if found := LISTED.match(self.type):
            most = number(found[1])
            for count in (1, most, most + 1):
                near += [["x"] * count, [5] * count, {str(token): 0.5 for token in range(count)}, [VOCABULARY - 1] * count]
            near += [["x" * int(found[4] or 1)], "x" * int(found[4] or 1), "x" * (int(found[4] or 1) + 1), [VOCABULARY], [-1]]
            near += [{"5": end + more} for end in (-100, 100) for more in (-1, 0, 1)] + [{str(VOCABULARY): 1}, {"1_0": 1}]
        values = [*ODD, *near]
        return [one if isinstance(one, str) else json.dumps(one) for one in values] if self.as_text else values


VOCABULARY = 264  # tokens of the toy decoder


def _are_ids(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(type(token) is int and 0 <= token < VOCABULARY for token in value)


def number(cell: str) -> int | float:
    cell = MEANT.get(cell, cell)
    text = str(cell).replace(",", "").removeprefix("above ")
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def table(page: str, first: str) -> list[Row]:
    """Returns a row for each name in a page's table whose header begins with this word."""
    lines = (DOCS / page).read_text("utf-8").splitlines()
    starts = [at for at, line in enumerate(lines) if re.match(rf"\| {first} \|.* type \|", line)]
    assert starts, f"docs/{page} has no table of {first}s with the column type"
    header, rows = _cells(lines[starts[0]]), []
    for line in lines[starts[0] + 2 :]:
        if not line.startswith("|"):
            break
        cells = dict(zip(header, _cells(line), strict=True))
        found = RANGE.fullmatch(cells["type"])
        kind, alone, least, most = found.groups("") if found else (cells["type"], "", "", "")
        for name in re.findall(r"`(\w+)`", cells[first]):
            rows.append(Row(name, cells.get("of", ""), kind, alone or least, most, cells.get("default", "")))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def faults(row: Row, value: Any, means: Row, said: str | None, null_is_default: bool, is_strict_json: bool) -> list[str]:
    """Returns how a way in that got this value differs from the table. `said`: its refusal.

    `means`: the row that says what is allowed. In strict JSON there is no NaN and no half of a surrogate pair.
    """
    allowed = (value is None and null_is_default and row.default != "required") or means.allows(value)
    as_json = _strict(value) or not is_strict_json
    shown = f"{row.name} = {json.dumps(value)[:80]}"
    if said is None:
        return [] if allowed and as_json else [f"{shown} is accepted, but the table does not allow it"]
    if allowed and as_json:
        return [f"{shown} is refused, but the table allows it: {said[:200]}"]
    wrong = []
    if len(said) > 1024:
        wrong.append(f"{shown} is refused with {len(said):,} characters")
    if "[invalid_input]" not in said:
        wrong.append(f"{shown} is refused without [invalid_input]: {said[:200]}")
    if as_json and not any(re.search(rf"\b{name}\b", said) for name in (row.name, means.name)):
        wrong.append(f"{shown} is refused without its name: {said[:200]}")
    return wrong


def _strict(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:  # NaN, infinity, or half of a surrogate pair
        return False
    return True
