"""Reads and writes the JSON files of placement and of clusters."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from hplm.errors import InvalidInput
from hplm.registry.folder import Folder

LARGEST = 1 << 62  # of any number in these files: sums of them stay exact
Word = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(pattern=r"^[^/]+\Z")]  # a part of a unit's name: backbone/domain/tenant
Whole = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Number = Annotated[float, Meta(ge=0, le=LARGEST)]
T = TypeVar("T")


class _Head(msgspec.Struct):
    kind: object = None
    format: object = None


def read(path: Path, kind: str, number: int, form: type[T], way_out: str) -> T:
    """Reads a file of this kind and format number. `way_out` ends each error: what the user should do."""
    try:
        content = path.read_bytes()
        head = msgspec.json.decode(content, type=_Head)
        if (head.kind, head.format) == (kind, number):
            return msgspec.json.decode(content, type=form)
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist: {way_out}") from None
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{path}: {str(error).replace('`', chr(39))}: {way_out}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON ({error}): {way_out}") from None
    raise InvalidInput(f"{path} has kind {head.kind!r} and format {head.format!r}, not {kind!r} and {number}: {way_out}")


def write(path: Path, kind: str, number: int, content: dict[str, Any]) -> None:
    """Writes a file, which is complete and synced, or not there."""
    text = json.dumps({"kind": kind, "format": number, **content}, indent=1) + "\n"
    Folder(path.parent).put(path.name, text.encode())


def refuse_twice(where: object, what: str, names: Iterable[str | int], way_out: str = "give each its own") -> None:
    """Refuses names of which one is there twice."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise InvalidInput(f"{where}: {what} {twice!r} is there twice: {way_out}")


def kind_of(path: Path) -> object:
    """Returns the kind of a file, or None if it is of none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Head).kind
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def digest(content: dict[str, Any]) -> str:
    """Returns a short name for the content, by which files that were made from it recognise it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
