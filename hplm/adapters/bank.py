"""A bank: fixed-size records of one kind and size in one memory-mapped file.

    page 0          JSON: format, layout, number of records
    record i        header (uid, version, checksum), then the weights, layer by layer, 16 bits each

A record says whose it is: a reader knows from its snapshot which uid and version it must find, and never uses another's.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hplm.errors import Broken, InvalidInput

FORMAT = 1
PAGE = 4096
HEADER = struct.Struct("<QII")  # uid, version, crc32 of the weights
HEADER_BYTES = 64  # keeps the weights on cache lines
DTYPE = torch.float16


@dataclass(frozen=True)
class Layout:
    """What a record holds: `kind` names the tensors, `size` is the rank of an adapter or the number of labels of a head."""

    kind: str
    size: int
    hidden: int
    layers: int

    def __post_init__(self) -> None:
        if self.kind not in ("bottleneck", "head"):
            raise InvalidInput(f"bank kind {self.kind!r} is not known: 'bottleneck' or 'head'")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors of one layer, in the order in which they lie in the record."""
        if self.kind == "head":
            return {"weight": (self.size, self.hidden), "bias": (self.size,)}
        return {
            "down": (self.size, self.hidden),
            "down_bias": (self.size,),
            "up": (self.hidden, self.size),
            "up_bias": (self.hidden,),
        }

    @property
    def layer_size(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def weight_bytes(self) -> int:
        return self.layers * self.layer_size * DTYPE.itemsize

    @property
    def record_bytes(self) -> int:
        return -(-(HEADER_BYTES + self.weight_bytes) // HEADER_BYTES) * HEADER_BYTES

    @property
    def file_name(self) -> str:
        return f"heads-{self.size}.bank" if self.kind == "head" else f"{self.kind}-r{self.size}.bank"

    def unpack(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """layers x layer_size -> for each layer its tensors, as views."""
        sizes = [prod(shape) for shape in self.shapes.values()]
        return [
            {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), layer.split(sizes), strict=True)}
            for layer in flat
        ]

    def pack(self, layers: Sequence[Mapping[str, Tensor]]) -> Tensor:
        flat = torch.empty(self.layers, self.layer_size, dtype=DTYPE)
        for target, source in zip(self.unpack(flat), layers, strict=True):
            for name, tensor in target.items():
                tensor.copy_(source[name])
        return flat


@dataclass(frozen=True)
class Record:
    """Where knowledge lies and whose it must be."""

    bank: str  # file name
    index: int
    uid: int
    version: int


class Bank:
    """A bank, mapped read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, ValueError):
            raise Broken(f"bank {path} is missing or empty: export the repository again") from None
        try:
            stored = json.loads(self._map[:PAGE].rstrip(b"\0"))
        except ValueError:
            raise Broken(f"bank {path} has no readable header: export the repository again") from None
        if stored.get("format") != FORMAT:
            raise InvalidInput(f"bank {path} has format {stored.get('format')!r}, this version of hplm reads {FORMAT}")
        self.layout = Layout(**stored["layout"])
        self.records: int = stored["records"]
        if len(self._map) < PAGE + self.records * self.layout.record_bytes:
            raise Broken(f"bank {path} is shorter than its {self.records} records: export the repository again")

    def read(self, record: Record, out: Tensor) -> None:
        """Copies a record's weights into `out` (layers x layer_size, fp16, CPU) and checks what was copied."""
        name = f"record {record.index} of {self.path.name}"
        if not 0 <= record.index < self.records:
            raise Broken(f"{name} does not exist: the bank has {self.records}")
        start = PAGE + record.index * self.layout.record_bytes
        uid, version, checksum = HEADER.unpack_from(self._map, start)
        if (uid, version) != (record.uid, record.version):
            raise Broken(f"{name} belongs to another tenant or version: export the tenant again")
        weights = memoryview(self._map)[start + HEADER_BYTES : start + HEADER_BYTES + self.layout.weight_bytes]
        target = out.view(torch.uint8).numpy().reshape(-1)
        target[:] = memoryview(weights)
        if zlib.crc32(target) != checksum:
            raise Broken(f"{name} is corrupt (checksum): export or restore the tenant")

    def weights(self, record: Record) -> list[dict[str, Tensor]]:
        """A record of one's own, by layer: for tools and references."""
        flat = torch.empty(self.layout.layers, self.layout.layer_size, dtype=DTYPE)
        self.read(record, flat)
        return self.layout.unpack(flat)


def write_bank(path: Path, layout: Layout, records: Sequence[tuple[int, int, Tensor]]) -> None:
    """Writes a whole bank of (uid, version, layers x layer_size) and gives it its name when it is complete."""
    temporary = path.with_name(path.name + ".writing")
    with open(temporary, "wb") as file:
        header = {"format": FORMAT, "layout": asdict(layout), "records": len(records)}
        file.write(json.dumps(header).encode().ljust(PAGE, b"\0"))
        for uid, version, flat in records:
            weights = flat.to(DTYPE).contiguous().view(torch.uint8).numpy().tobytes()
            head = HEADER.pack(uid, version, zlib.crc32(weights))
            file.write((head.ljust(HEADER_BYTES, b"\0") + weights).ljust(layout.record_bytes, b"\0"))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
