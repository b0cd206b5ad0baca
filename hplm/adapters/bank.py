"""A bank: fixed-size records of one kind and size in one memory-mapped file.

    page 0          JSON: format, layout
    record i        header (uid, version, checksum), then the weights, layer by layer, 16 bits each

A record's header says which tenant it belongs to. A reader knows the uid and version from its snapshot, and never uses another
record. A bank grows at its end. A record is not overwritten while a reader may still read it.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from hplm.adapters.layout import Layout
from hplm.adapters.record import Record
from hplm.errors import Broken, InvalidInput
from hplm.model.tensors import array_of

FORMAT = 4
READABLE = (3, FORMAT)  # 3 has no widths of queries and keys, and no gate
PAGE = 4096
HEADER = struct.Struct("<QII")  # uid, version, crc32 of the weights
HEADER_BYTES = 64  # keeps the weights on cache lines
WAY_OUT = "export the repository again"


class Bank:
    """A bank, mapped read-only. An open bank can still be read after its file was removed.

    `way_out` ends error messages: what the user should do if the bank is broken.
    """

    def __init__(self, path: Path, way_out: str = WAY_OUT) -> None:
        self.path = path
        self._way_out = way_out
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._missing() from None
        except OSError as error:
            raise Broken(f"cannot read bank {path}: {error.strerror}") from None
        weakref.finalize(self, os.close, self._descriptor)
        self._map = self._mapped()
        self.layout = layout_in(self._map[:PAGE], f"bank {path}", way_out)

    @property
    def records(self) -> int:
        """The number of whole records when the file was last mapped."""
        return (len(self._map) - PAGE) // record_bytes(self.layout)

    def headers(self) -> Iterator[bytes]:
        """Yields the header of each record: uid, version and checksum."""
        for start in range(PAGE, PAGE + self.records * record_bytes(self.layout), record_bytes(self.layout)):
            yield self._map[start : start + HEADER.size]

    def owner(self, index: int) -> tuple[int, int]:
        """Returns the uid and the version in a record's header."""
        uid, version, _ = HEADER.unpack_from(self._map, PAGE + index * record_bytes(self.layout))
        return uid, version

    def broken(self, progress: Callable[[int], object]) -> Iterator[int]:
        """Yields the records that do not match their checksums. Calls `progress` with the number of bytes read."""
        size = record_bytes(self.layout)
        for index in range(self.records):
            if not is_sound(os.pread(self._descriptor, size, PAGE + index * size), self.layout):
                yield index
            progress(size)

    def read(self, record: Record, out: Tensor) -> None:
        """Copies a record's weights into `out` (`layout.empty()`) and checks the copy."""
        name = f"record {record.index} of {self.path.name}"
        if record.index >= self.records:
            self._map = self._mapped()  # it may have grown
        if not 0 <= record.index < self.records:
            raise Broken(f"{name} does not exist: the bank has {self.records}")
        start = PAGE + record.index * record_bytes(self.layout)
        uid, version, checksum = HEADER.unpack_from(self._map, start)
        if (uid, version) != (record.uid, record.version):
            raise Broken(f"{name} belongs to another tenant or version: {self._way_out}")
        weights = memoryview(self._map)[start + HEADER_BYTES : start + HEADER_BYTES + self.layout.weight_bytes]
        target = array_of(out.view(torch.uint8)).reshape(-1)
        target[:] = memoryview(weights)
        if zlib.crc32(target.data) != checksum:
            raise Broken(f"{name} is corrupt (checksum): {self._way_out}")

    def weights(self, record: Record) -> list[dict[str, Tensor]]:
        """Returns a copy of a record's weights, by layer: for tools and references."""
        flat = self.layout.empty()
        self.read(record, flat)
        return self.layout.unpack(flat)

    def _mapped(self) -> mmap.mmap:
        try:
            return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise self._missing() from None
        except OSError as error:
            raise Broken(f"cannot map bank {self.path}: {error.strerror}") from None

    def _missing(self) -> Broken:
        return Broken(f"bank {self.path} is missing or empty: {self._way_out}")


def layout_in(page: bytes, bank: str, way_out: str = WAY_OUT) -> Layout:
    """Returns the layout that the first page of a bank describes."""
    try:
        stored = json.loads(page.rstrip(b"\0"))
        found = stored["format"]
        layout = None
        if found in READABLE:
            layout = Layout(**(stored["layout"] | {"places": tuple(stored["layout"]["places"])}))
    except (InvalidInput, ValueError, TypeError, KeyError):
        raise Broken(f"{bank} has no readable header: {way_out}") from None
    if layout is None:
        raise InvalidInput(f"{bank} has format {found!r}, but this version of hplm reads {READABLE[0]} and {FORMAT}: {way_out}")
    return layout


def record_bytes(layout: Layout) -> int:
    return -(-(HEADER_BYTES + layout.weight_bytes) // HEADER_BYTES) * HEADER_BYTES


def write_bank(path: Path, layout: Layout, records: Iterable[tuple[int, int, Tensor]]) -> None:
    """Writes a whole bank of (uid, version, layers x layer_size) under a temporary name, and renames it when it is complete."""
    temporary = path.with_name(path.name + ".writing")
    with open(temporary, "wb") as file:
        file.write(json.dumps({"format": FORMAT, "layout": asdict(layout)}).encode().ljust(PAGE, b"\0"))
        for uid, version, flat in records:
            file.write(_packed(layout, uid, version, flat))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def write_record(path: Path, layout: Layout, index: int, uid: int, version: int, flat: Tensor) -> None:
    """Writes a record into a free place, or directly behind the last record. No reader may still read that place."""
    write_packed(path, {index: _packed(layout, uid, version, flat)})


def write_packed(path: Path, records: Mapping[int, bytes]) -> None:
    """Writes records as they lie in another bank, under the same rules as `write_record`."""
    with open(path, "r+b") as file:
        for index, record in records.items():
            file.seek(PAGE + index * len(record))
            file.write(record)
        file.flush()
        os.fsync(file.fileno())


def packed_owner(record: bytes) -> tuple[int, int]:
    """Returns the uid and the version in a record's header."""
    uid, version, _ = HEADER.unpack_from(record)
    return uid, version


def is_sound(record: bytes, layout: Layout) -> bool:
    """Whether a record's weights match its checksum."""
    weights = memoryview(record)[HEADER_BYTES : HEADER_BYTES + layout.weight_bytes]
    return zlib.crc32(weights) == HEADER.unpack_from(record)[2]


def _packed(layout: Layout, uid: int, version: int, flat: Tensor) -> bytes:
    weights = array_of(flat.to(layout.torch_dtype).contiguous().view(torch.uint8)).tobytes()
    head = HEADER.pack(uid, version, zlib.crc32(weights))
    return (head.ljust(HEADER_BYTES, b"\0") + weights).ljust(record_bytes(layout), b"\0")
