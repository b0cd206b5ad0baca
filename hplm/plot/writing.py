"""Writes a table in batches of rows. An interruption loses one batch at most, and a resumed table has the same bytes."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from hplm.arrays import Array
from hplm.disk import NoSpace
from hplm.errors import Broken, InvalidInput
from hplm.model.tensors import array_of
from hplm.plot.index import write_index
from hplm.plot.meta import TableMeta, TableSpec
from hplm.plot.rows import CODINGS, LEAST_COSINE, closeness
from hplm.plot.table import Table

BATCH = 4096
CLOSENESS = "closeness"  # a file that exists while a table is written: the lowest cosine of each batch

ValuesOf = Callable[[Array], Tensor]  # windows x n of id + 1 -> windows x vectors x hidden, fp32, on the CPU
Encode = Callable[[Array], tuple[Array, float]]  # keys -> stored rows, and the lowest cosine of a vector and its stored form


def write_table(
    folder: Path,
    spec: TableSpec,
    keys: Array,
    values_of: ValuesOf,
    batch: int = BATCH,
    progress: Callable[[int], object] = lambda rows: None,
    known: Table | None = None,
) -> Table:
    """Writes `keys` and their values. The keys are distinct and in order of their rows.

    `keys` may be mapped and larger than memory. Rows of keys that `known` has are copied from it, byte for byte. An interrupted
    call with the same arguments is continued.
    """
    alike = "window", "vocabulary", "hidden", "dtype"
    if known is not None and any(getattr(known.meta, name) != getattr(spec, name) for name in alike):
        raise ValueError(f"cannot copy rows of {known.folder} into {folder}: window, vocabulary, size or dtype differ")
    work = folder.with_name(folder.name + ".writing")
    work.mkdir(parents=True, exist_ok=True)
    try:
        if not (work / "meta.json").exists():
            _write_parts(work, spec, keys, partial(_encoded, spec, values_of, known), batch, progress)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        needed = (len(keys) + 1) * spec.row_bytes / 1e9
        raise NoSpace(
            f"no space left while writing {work}: the values take {needed:,.2f} GB. Free some space and run the same command "
            "again: it goes on from here. No finished table was touched"
        ) from None
    (work / CLOSENESS).unlink(missing_ok=True)
    work.rename(folder)
    return Table(folder)


def _write_parts(
    work: Path, spec: TableSpec, keys: Array, encode: Encode, batch: int, progress: Callable[[int], object]
) -> None:
    """Writes the values, the index, and last `meta.json`, whose presence means that the table is complete.

    One batch of values is computed while the batch before it is written.
    """
    with _Drafts(work, spec, batch) as drafts, ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        progress(min(drafts.batches * batch, len(keys)))
        for start in range(drafts.batches * batch, len(keys), batch):
            rows, close = encode(np.asarray(keys[start : start + batch]))
            if written is not None:
                written.result()
            written = writer.submit(drafts.append, rows, close)
            progress(len(rows))
        if written is not None:
            written.result()
    index = write_index(work, keys)
    least = float(np.fromfile(work / CLOSENESS, dtype="<f4").min()) if len(keys) else 1.0
    meta = TableMeta(**asdict(spec), keys=len(keys), least_cosine=round(least, 6), index=index)
    meta.save(work / "meta.json.new")
    for name in (*meta.sizes(), "meta.json.new"):
        with open(work / name, "rb") as file:
            os.fsync(file.fileno())
    (work / "meta.json.new").rename(work / "meta.json")


def _encoded(spec: TableSpec, values_of: ValuesOf, known: Table | None, keys: Array) -> tuple[Array, float]:
    """Is an `Encode`. It copies the rows that `known` has."""
    if known is None:
        return _computed(spec, values_of, keys)
    found = known.index.find(keys)
    old = found[found > 0]
    if len(broken := known.rows.touch(old)):
        raise Broken(f"row {broken[0]} of {known.folder} does not match its checksum: build that table again")
    rows = np.empty((len(keys), spec.row_bytes), dtype=np.uint8)
    rows[found > 0] = known.rows.raw(old)
    close = known.meta.least_cosine
    if len(old) < len(keys):
        rows[found == 0], new_close = _computed(spec, values_of, keys[found == 0])
        close = min(close, new_close)
    return rows, close


def _computed(spec: TableSpec, values_of: ValuesOf, keys: Array) -> tuple[Array, float]:
    vectors = values_of(spec.space.unpack(keys))
    coding = CODINGS[spec.dtype]
    stored = coding.encode(vectors)
    close = closeness(vectors, coding.decode(coding.typed(stored)).view_as(vectors))
    if not close >= LEAST_COSINE:  # also if the cosine is NaN, as of numbers too large for the dtype
        raise InvalidInput(
            f"{spec.dtype} keeps only a cosine of {close:.5f} of a vector of domain {spec.domain!r}, but {LEAST_COSINE} is "
            "required: use --dtype fp16 or bf16. If that fails too, the lower stack is damaged: adapt it again"
        )
    return array_of(stored.view(len(keys), spec.row_bytes)), close


class _Drafts:
    """The growing files. `values` and `checksums` have an entry for each row, the null row first, CLOSENESS for each batch."""

    def __init__(self, work: Path, spec: TableSpec, batch: int) -> None:
        self._files = {name: open(work / name, "a+b") for name in ("values", "checksums", CLOSENESS)}  # noqa: SIM115
        self.batches = self._sound_batches(work, spec.row_bytes, batch)
        rows = 1 + self.batches * batch if self.batches else 0
        for name, size in (("values", rows * spec.row_bytes), ("checksums", rows * 4), (CLOSENESS, self.batches * 4)):
            self._files[name].truncate(size)
        if not rows:
            self._add_rows(np.zeros((1, spec.row_bytes), dtype=np.uint8))

    def __enter__(self) -> _Drafts:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def append(self, rows: Array, close: float) -> None:
        self._add_rows(rows)
        self._add(CLOSENESS, np.float32(close).tobytes())

    def _add_rows(self, rows: Array) -> None:
        self._add("values", rows.data)
        self._add("checksums", np.array([zlib.crc32(row) for row in rows], dtype="<u4").data)

    def _add(self, name: str, content: bytes | memoryview) -> None:
        self._files[name].write(content)
        self._files[name].flush()

    def _sound_batches(self, work: Path, row_bytes: int, batch: int) -> int:
        """Returns how many batches from the start are complete and match their checksums."""
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}
        whole = min(sizes["values"] // row_bytes, sizes["checksums"] // 4) - 1
        most = min(max(0, whole) // batch, sizes[CLOSENESS] // 4)
        checksums = np.fromfile(work / "checksums", dtype="<u4")
        with open(work / "values", "rb") as values:
            values.seek(row_bytes)
            for number in range(most):
                rows = np.frombuffer(values.read(batch * row_bytes), dtype=np.uint8).reshape(batch, row_bytes)
                first = 1 + number * batch
                if [zlib.crc32(row) for row in rows] != checksums[first : first + batch].tolist():
                    return number
        return most
