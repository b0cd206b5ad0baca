"""Reads and writes the JSON files of placement: clusters, profiles and placements."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

from hplm.errors import InvalidInput

LARGEST = 1 << 62  # of any number in these files: sums of them stay exact


class Fields:
    """One JSON object of a file. Its methods return a field, or raise InvalidInput with the file, the field and its value."""

    def __init__(self, stored: object, where: str, way_out: str) -> None:
        self.where = where
        self._way_out = way_out
        if not isinstance(stored, dict):
            self._refuse(stored, "an object")
        self._stored = cast("dict[str, Any]", stored)

    @classmethod
    def of_file(cls, path: Path, kind: str, number: int, way_out: str) -> Fields:
        """Opens a file of this kind and format number. `way_out` ends each error: what the user should do."""
        try:
            stored = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise InvalidInput(f"{path} does not exist: {way_out}") from None
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{path} is not JSON ({error}): {way_out}") from None
        fields = cls(stored, str(path), way_out)
        found = fields._stored.get("kind"), fields._stored.get("format")
        if found != (kind, number):
            raise InvalidInput(f"{path} has kind {found[0]!r} and format {found[1]!r}, not {kind!r} and {number}: {way_out}")
        return fields

    def text(self, name: str) -> str:
        value = self._value(name)
        return value if isinstance(value, str) and value else self._refuse(value, "a word", name)

    def whole(self, name: str, least: int = 0) -> int:
        value = self._value(name)
        is_right = type(value) is int and least <= value <= LARGEST
        return value if is_right else self._refuse(value, f"a whole number >= {least}", name)

    def number(self, name: str) -> float:
        value = self._value(name)
        if type(value) not in (int, float) or not 0 <= value < math.inf or value > LARGEST:
            self._refuse(value, "a number >= 0", name)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self._list(name)
        return tuple(values) if all(isinstance(value, str) for value in values) else self._refuse(values, "words", name)

    def wholes(self, name: str) -> tuple[int, ...]:
        values = self._list(name)
        is_right = all(type(value) is int and 0 <= value <= LARGEST for value in values)
        return tuple(values) if is_right else self._refuse(values, "whole numbers >= 0", name)

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        found: list[tuple[int, int]] = []
        for value in self._list(name):
            pair = cast("list[object]", value) if isinstance(value, list) else []
            first, last = pair if len(pair) == 2 else (0, -1)
            if type(first) is not int or type(last) is not int or not 0 <= first <= last <= LARGEST:
                self._refuse(pair, "a first and a last number", name)
            found.append((first, last))
        return tuple(found)

    def fields(self, name: str) -> Fields:
        return Fields(self._value(name), f"{self.where}: {name}", self._way_out)

    def list(self, name: str) -> list[Fields]:
        """Returns a list of objects."""
        return [Fields(value, f"{self.where}: {name}[{i}]", self._way_out) for i, value in enumerate(self._list(name))]

    def names(self) -> Iterator[str]:
        return iter(self._stored)

    def refuse(self, name: str, wanted: str) -> NoReturn:
        self._refuse(self._stored.get(name), wanted, name)

    def _list(self, name: str) -> list[Any]:
        value = self._value(name)
        return cast("list[Any]", value) if isinstance(value, list) else self._refuse(value, "a list", name)

    def _value(self, name: str) -> Any:
        if name not in self._stored:
            raise InvalidInput(f"{self.where}: {name!r} is missing: {self._way_out}")
        return self._stored[name]

    def _refuse(self, value: object, wanted: str, name: str | None = None) -> NoReturn:
        field = self.where if name is None else f"{self.where}: {name!r}"
        raise InvalidInput(f"{field} is {json.dumps(value)[:80]}, not {wanted}: {self._way_out}")


def write(path: Path, kind: str, number: int, content: dict[str, Any]) -> None:
    """Writes a file under a temporary name of its own, and renames it when it is complete and synced."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.writing")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "format": number, **content}, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def kind_of(path: Path) -> object:
    """Returns the kind of a file, or None if it is of none."""
    try:
        stored = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, object]", stored).get("kind") if isinstance(stored, dict) else None


def digest(content: dict[str, Any]) -> str:
    """Returns a short name for the content, by which files that were made from it recognise it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
