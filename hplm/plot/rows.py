"""The stored rows of a table, memory-mapped: read ahead in parallel, and checked at first use.

They store vectors in 16 bits a number, or in 8 bits with a scale and an offset for each vector. The engine and the reference
read the same numbers.

A page fault reads one page and waits for it, so a batch on an SSD would wait some hundred times. Here the kernel is first told
all rows of a batch that may not be in memory, and reads them together. One thread owns the rows.
"""

from __future__ import annotations

import mmap
import os
import resource
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hplm.arrays import Array
from hplm.options import TABLE_DTYPES
from hplm.plot.meta import SCALE_AND_OFFSET, TableMeta

BLOCK = 8 << 20
READERS = 8
ROWS_CHECKED = 4096  # rows in one step of a check of all rows


class SixteenBit:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, vectors: Tensor) -> Tensor:
        """Turns fp32 (... x hidden) into uint8 (vectors x `vector_bytes`)."""
        return vectors.reshape(-1, vectors.shape[-1]).to(self._dtype).contiguous().view(torch.uint8)

    def typed(self, stored: Tensor) -> Tensor:
        """Returns a view of uint8 (vectors x `vector_bytes`) in the stored type, without a copy."""
        return stored.view(self._dtype)

    def decode(self, typed: Tensor) -> Tensor:
        """Returns fp32 (vectors x hidden)."""
        return typed.float()

    def bags(self, typed: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns in `dtype` the sums of the vectors that each row of `index` names, on the vectors' device.

        An fp32 engine, which must be exact, sums in fp32. A 16-bit engine takes the fused 16-bit sum.
        """
        tokens, n = index.shape
        if dtype == torch.float32:
            vectors = typed.index_select(0, index.T.flatten()).view(n, tokens, -1)
            total = vectors[0].float()
            for others in vectors[1:]:
                total += others
            return total
        ends = torch.arange(0, tokens * n + 1, n, device=index.device)
        sums = F.embedding_bag(index.flatten(), typed, ends, mode="sum", include_last_offset=True)
        # Direct conversion between the 16-bit formats is slower.
        return sums if sums.dtype == dtype else sums.float().to(dtype)


class EightBitRows:
    """Stores each vector in 255 steps between its own lowest and highest number."""

    def encode(self, vectors: Tensor) -> Tensor:
        return torch.ops.quantized.embedding_bag_byte_prepack(vectors.reshape(-1, vectors.shape[-1]).float().contiguous())

    def typed(self, stored: Tensor) -> Tensor:
        return stored

    def decode(self, typed: Tensor) -> Tensor:
        numbers, tail = typed[:, :-SCALE_AND_OFFSET], typed[:, -SCALE_AND_OFFSET:]
        scale_and_offset = tail.contiguous().view(torch.float32)
        return numbers.float() * scale_and_offset[:, :1] + scale_and_offset[:, 1:]

    def bags(self, typed: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        if typed.device.type == "cpu":
            bag = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
            return bag(typed, index, None, False, 0, False, None, None, False).to(dtype)
        return self.decode(typed.index_select(0, index.flatten())).view(*index.shape, -1).sum(1).to(dtype)


Coding = SixteenBit | EightBitRows
CODINGS: dict[str, Coding] = dict(
    zip(TABLE_DTYPES, (SixteenBit(torch.float16), SixteenBit(torch.bfloat16), EightBitRows()), strict=True)
)
LEAST_COSINE = 0.999  # between a vector and its stored form


def closeness(vectors: Tensor, decoded: Tensor) -> float:
    """Returns the lowest cosine between vectors and their stored form. Zeros stored as zeros count as equal."""
    cosines = F.cosine_similarity(vectors.float(), decoded, dim=-1)
    both_zero = (vectors == 0).all(-1) & (decoded == 0).all(-1)
    return float(torch.where(both_zero, 1.0, cosines).min()) if len(cosines) else 1.0


class StoredRows:
    """Row 0 is zeros. Frequent n-grams have the first rows, so that rows in use are close together."""

    def __init__(self, folder: Path, meta: TableMeta) -> None:
        self._path = folder / "values"
        self._checksums = np.fromfile(folder / "checksums", dtype="<u4")
        self._file = open(self._path, "rb")  # noqa: SIM115
        mapped = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)  # otherwise each fault also reads the 128 KiB around it
        self._bytes = memoryview(mapped)
        self._stride, self._vectors, self._coding = meta.row_bytes, meta.window.vectors, CODINGS[meta.dtype]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to it
            stored = torch.frombuffer(mapped, dtype=torch.uint8)
        self.typed = self._coding.typed(stored.view(-1, meta.vector_bytes))
        self._sound = np.zeros(meta.rows, dtype=bool)  # the row has matched its checksum
        self._warm = np.zeros(meta.rows, dtype=bool)  # the row was read, and no sign says that it has left memory

    def __len__(self) -> int:
        return len(self._sound)

    def touch(self, rows: Array) -> Array:
        """Reads rows into memory, all at once, and checks the new ones. Returns the rows that do not match their checksum."""
        cold = rows[~self._warm.take(rows)]
        if not len(cold):
            return cold
        cold = np.unique(cold)
        descriptor = self._file.fileno()
        for start in (cold * self._stride).tolist():
            os.posix_fadvise(descriptor, start, self._stride, os.POSIX_FADV_WILLNEED)
        unseen = cold[~self._sound.take(cold)]
        good = np.fromiter((self._checksum(row) for row in unseen.tolist()), "<u4", len(unseen)) == self._checksums.take(unseen)
        self._sound[unseen[good]] = True
        self._warm[cold] = self._sound.take(cold)
        return unseen[~good]

    def count_as_cold(self) -> None:
        """Reads all rows ahead again. If touched rows were on disk, memory is short, and any may be gone."""
        self._warm[:] = False

    def raw(self, rows: Array) -> Array:
        """Returns the bytes of rows, which must have been touched."""
        return np.frombuffer(self._bytes, dtype=np.uint8).reshape(len(self), self._stride)[rows]

    def vectors(self, row: int) -> Tensor:
        """Returns the stored vectors of one row: vectors x hidden, fp32."""
        return self._coding.decode(self.typed[row * self._vectors : (row + 1) * self._vectors])

    def copy(self, rows: int, device: torch.device) -> Tensor:
        """Copies the first rows to a device."""
        return self.typed[: rows * self._vectors].to(device, copy=True)

    def preload(self, rows: int | None = None) -> None:
        """Reads the first `rows` (default: all) into the page cache."""
        size = min(len(self) if rows is None else rows, len(self)) * self._stride

        def read(start: int) -> None:
            os.pread(self._file.fileno(), min(BLOCK, size - start), start)

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, range(0, size, BLOCK)))
        self._warm[: size // self._stride] = self._sound[: size // self._stride]

    def broken(self, progress: Callable[[int], object] = lambda size: None) -> Iterator[int]:
        """Yields the rows that do not match their checksums. Calls `progress` with the number of bytes read."""
        for start in range(0, len(self), ROWS_CHECKED):
            rows = np.arange(start, min(start + ROWS_CHECKED, len(self)))
            yield from self.touch(rows).tolist()
            progress(len(rows) * self._stride)

    def _checksum(self, row: int) -> int:
        return zlib.crc32(self._bytes[row * self._stride : (row + 1) * self._stride])


def disk_faults() -> int:
    """Returns how often this process had to wait for a page from the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
