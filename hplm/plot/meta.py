"""The `meta.json` of a table. Lookup, which reads no rows, reads it without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from hplm.errors import Broken, InvalidInput
from hplm.model.windows import Window
from hplm.options import TABLE_DTYPES
from hplm.plot.index import IndexMeta
from hplm.plot.keys import KeySpace

FORMAT = 2
SCALE_AND_OFFSET = 8  # bytes: two fp32 behind the 8-bit numbers of a vector


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
