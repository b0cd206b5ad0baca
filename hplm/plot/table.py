"""One table on disk: `meta.json`, the index (`starts`, `keys`, `rows`), `values`, and `checksums` with one for each row.

Rows are in order of frequency, length by length, and the lengths lie side by side (builder/tables/ranking.py). Row 0 is zeros
and belongs to no key, so that a missing row can be gathered like any other. A table is written under a temporary name, synced
and renamed. A mapped file never changes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hplm.errors import Broken, InvalidInput
from hplm.model.windows import Window
from hplm.options import TABLE_DTYPES
from hplm.plot.index import Index, IndexMeta
from hplm.plot.keys import KeySpace

if TYPE_CHECKING:  # lookup, which reads no rows, starts without torch
    from hplm.plot.rows import Coding, StoredRows

FORMAT = 2
SCALE_AND_OFFSET = 8  # bytes: two fp32 behind the 8-bit numbers of a vector


@dataclass(frozen=True)
class Branch:
    """A table's domain and version, and its first address."""

    domain: str
    version: int
    base: int
    unique: str = ""  # a part of its folder's name: no name is used twice; an export has none

    @property
    def place(self) -> tuple[str, int]:
        return self.domain, self.version

    @property
    def folder(self) -> str:
        """Its folder under `plot/`."""
        return f"{self.domain}/{self.version}{self.unique}"


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """The properties of a table that are known before it is written."""

    domain: str
    version: int
    parent: str | None  # see `parent_branch`
    parent_version: int | None
    n: int
    causal: bool
    vocabulary: int
    hidden: int
    dtype: str
    corpus_tokens: int

    @property
    def parent_branch(self) -> tuple[str, int] | None:
        """The domain and version of the table that this one falls back to; None for a root."""
        if self.parent is None or self.parent_version is None:
            return None
        return self.parent, self.parent_version

    @property
    def window(self) -> Window:
        return Window(self.n, self.causal)

    @property
    def space(self) -> KeySpace:
        return KeySpace(self.vocabulary, self.window)

    @property
    def coding(self) -> Coding:
        from hplm.plot.rows import CODINGS

        return CODINGS[self.dtype]

    @property
    def vector_bytes(self) -> int:
        """The bytes that a stored vector takes."""
        if self.dtype not in TABLE_DTYPES:
            raise InvalidInput(f"unknown table dtype {self.dtype!r}: choose {', '.join(TABLE_DTYPES)}")
        return self.hidden + SCALE_AND_OFFSET if self.dtype == "int8" else 2 * self.hidden

    @property
    def row_bytes(self) -> int:
        return self.window.vectors * self.vector_bytes


@dataclass(frozen=True, kw_only=True)
class TableMeta(TableSpec):
    keys: int
    least_cosine: float  # the lowest cosine between a computed vector and its stored form
    index: IndexMeta
    format: int = FORMAT

    @property
    def rows(self) -> int:
        return self.keys + 1

    def sizes(self) -> dict[str, int]:
        return {**self.index.sizes(), "values": self.rows * self.row_bytes, "checksums": 4 * self.rows}

    @property
    def megabytes(self) -> float:
        return round(sum(self.sizes().values()) / 1e6, 3)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> TableMeta:
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise InvalidInput(f"{path.parent} contains no table: meta.json is missing") from None
        return cls.read(text, path)

    @classmethod
    def read(cls, text: bytes, path: object) -> TableMeta:
        try:
            stored = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Broken(f"{path} is no JSON object ({error}): build or copy the table again") from None
        if (found := stored.get("format", FORMAT)) != FORMAT:
            raise InvalidInput(f"{path} has format {found!r}, but this version of hplm reads {FORMAT}: build the table again")
        try:
            meta = msgspec.convert(stored, cls)
            _ = meta.sizes(), meta.space.masks
        except (msgspec.ValidationError, ZeroDivisionError, InvalidInput) as error:  # no window, or no word for a token
            raise Broken(f"{path} does not describe a table ({error}): build or copy the table again") from None
        return meta


class Table:
    """An open table. The index and the rows are opened when they are first used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = TableMeta.load(folder / "meta.json")
        self.space = self.meta.space
        for name, size in self.meta.sizes().items():
            file = folder / name
            if (found := file.stat().st_size if file.exists() else 0) != size:
                raise Broken(f"{file} has {found} bytes, but its meta.json says {size}: build or copy the table again")

    @property
    def size(self) -> int:
        """The number of rows, including the null row."""
        return self.meta.rows

    @cached_property
    def index(self) -> Index:
        return Index(self.folder, self.meta.index)

    @cached_property
    def rows(self) -> StoredRows:
        from hplm.plot.rows import StoredRows

        return StoredRows(self.folder, self.meta)

    def verify(self) -> None:
        """Checks all files against their checksums. Raises Broken with the file and the row."""
        _ = self.index
        first = next(self.rows.broken(), None)
        if first is not None:
            raise Broken(f"row {first} of {self.folder / 'values'} does not match its checksum: build or copy the table again")
