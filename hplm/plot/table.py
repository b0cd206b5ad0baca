"""One table on disk: `meta.json`, sorted `keys`, `values` in the order of the keys, `checksums` by block.

Row 0 of the values is all zeros and belongs to no key, so that "nothing here" can be gathered like anything else.
A table is written once under a temporary name, synced and renamed; a mapped file never changes.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hplm.errors import Broken, InvalidInput
from hplm.plot.keys import KeySpace

FORMAT = 1
BLOCK = 1 << 20  # bytes under one checksum
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TableMeta:
    domain: str
    version: int
    parent: str | None  # domain and version the table falls back to; None for the root
    parent_version: int | None
    n: int
    vocabulary: int
    hidden: int
    dtype: str
    keys: int
    corpus_tokens: int
    format: int = FORMAT

    @property
    def rows(self) -> int:
        return self.keys + 1

    @property
    def value_bytes(self) -> int:
        return self.rows * self.n * self.hidden * DTYPES[self.dtype].itemsize


class Table:
    """A table, mapped read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = _read_meta(folder)
        self.space = KeySpace(self.meta.vocabulary, self.meta.n)
        _expect_size(folder / "keys", self.meta.keys * 8)
        _expect_size(folder / "values", self.meta.value_bytes)
        # As a plain array: every slice of a memmap is a memmap again, which costs more than the search in it.
        self.keys = np.asarray(np.memmap(folder / "keys", "<u8", "r")) if self.meta.keys else np.empty(0, "<u8")
        shape = (self.meta.rows * self.meta.n, self.meta.hidden)
        dtype = DTYPES[self.meta.dtype]
        # A private mapping: read-only as far as the file is concerned.
        self.values: Tensor = torch.from_file(
            str(folder / "values"), shared=False, size=shape[0] * shape[1], dtype=dtype
        ).view(shape)

    @property
    def rows(self) -> int:
        return self.meta.rows

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Row of each key, 0 where the table has none."""
        if not len(self.keys):
            return np.zeros(len(keys), dtype=np.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, at + 1, 0)

    def verify(self) -> None:
        """Every block against its checksum; raises Broken with the file and the block."""
        stored = np.fromfile(self.folder / "checksums", dtype="<u4")
        found = np.array(list(_checksums(self.folder)), dtype="<u4")
        if len(stored) != len(found) or (stored != found).any():
            block = int(np.flatnonzero(stored != found)[0]) if len(stored) == len(found) else -1
            raise Broken(f"table {self.folder} does not match its checksums (block {block}): build or copy it again")


def write_table(
    folder: Path,
    meta: TableMeta,
    keys: np.ndarray,
    values_of: Callable[[np.ndarray], Tensor],
    batch: int = 4096,
    progress: Callable[[int], None] = lambda done: None,
) -> Table:
    """Writes `keys` (sorted, distinct) with `values_of(windows) -> windows x n x hidden`, a batch at a time."""
    if len(keys) > 1 and not (keys[1:] > keys[:-1]).all():
        raise ValueError("keys must be sorted and distinct")
    space = KeySpace(meta.vocabulary, meta.n)
    temporary = folder.with_name(folder.name + ".writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    keys.astype("<u8").tofile(temporary / "keys")
    with open(temporary / "values", "wb") as out:
        dtype = DTYPES[meta.dtype]
        _write_values(out, torch.zeros(1, meta.n, meta.hidden, dtype=dtype))
        for start in range(0, len(keys), batch):
            windows = space.unpack(keys[start : start + batch])
            _write_values(out, values_of(windows).to(dtype))
            progress(len(windows))
    np.array(list(_checksums(temporary)), dtype="<u4").tofile(temporary / "checksums")
    (temporary / "meta.json").write_text(json.dumps(asdict(meta), indent=2) + "\n", "utf-8")
    for file in temporary.iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    temporary.rename(folder)
    return Table(folder)


def _write_values(out, values: Tensor) -> None:
    out.write(values.contiguous().view(torch.uint8).numpy().data)


def _checksums(folder: Path) -> Iterator[int]:
    for name in ("keys", "values"):
        with open(folder / name, "rb") as file:
            while block := file.read(BLOCK):
                yield zlib.crc32(block)


def _read_meta(folder: Path) -> TableMeta:
    path = folder / "meta.json"
    try:
        stored = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"{folder} holds no table: meta.json is missing") from None
    except ValueError as error:
        raise Broken(f"{path} is not JSON: {error}") from None
    if stored.get("format") != FORMAT:
        raise InvalidInput(
            f"{path} has format {stored.get('format')!r}, this version of hplm reads {FORMAT}: build the table again"
        )
    return TableMeta(**stored)


def _expect_size(file: Path, size: int) -> None:
    found = file.stat().st_size if file.exists() else 0
    if found != size:
        raise Broken(f"{file} has {found} bytes where its meta.json promises {size}: build or copy the table again")
