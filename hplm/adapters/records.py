"""Record files: one version of a tenant. Its head, adapter and exits, and those of its students, are one tensor each of a
safetensors file, whose header says the rest. A store, an export and a registry have the same bytes.

A file never changes, and its name ends with the digest of its content. So whoever has the name of a record has its weights, and
a file may be copied anywhere. It is opened for each reading: thousands of open files would be more than a process may have.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from hplm.adapters.layout import Layout
from hplm.adapters.record import Record, file_name
from hplm.errors import Broken
from hplm.model.tensors import array_of

FORMAT = 2
FIELD = "hplm"  # of the safetensors header
WAY_OUT = (
    "restore the state with `hplm restore`, update the tenant with `hplm tenant update`, or export the repository again with "
    "--replace"
)

LayoutWeights = tuple[Layout, Sequence[Mapping[str, Tensor]]]  # with the tensors of each layer


@dataclass(frozen=True)
class RecordFile:
    """A record file in memory. Raises one of MISFITS where the content is not that of such a file."""

    content: bytes
    unique: str = ""  # what the file's name begins with, so that it is not used twice

    @cached_property
    def name(self) -> str:
        return file_name(self.content, self.unique)

    @cached_property
    def header(self) -> dict[str, Any]:
        """Holds what the file says of itself: `format`, `layouts` and `tenant`."""
        return header_of(self._header)

    @cached_property
    def records(self) -> Mapping[str, Record]:
        """The records in the file, by the names of their parts."""
        begin, file, stored = 8 + len(self._header), self.name, json.loads(self._header)
        records: dict[str, Record] = {}
        for name, layout in self.header["layouts"].items():
            start, end = (begin + offset for offset in stored[name]["data_offsets"])
            records[name] = Record(file, layout, start, zlib.crc32(memoryview(self.content)[start:end]))
        return records

    def weights(self, record: Record) -> list[dict[str, Tensor]]:
        """Returns a copy of a record's weights, by layer."""
        layout = Layout.of(record.layout)
        own = bytearray(memoryview(self.content)[record.offset : record.offset + layout.weight_bytes])
        layers = layout.unpack(torch.frombuffer(own, dtype=layout.torch_dtype).view(layout.layers, layout.layer_size))
        return [{name: tensor.contiguous() for name, tensor in layer.items()} for layer in layers]

    @property
    def _header(self) -> bytes:
        return self.content[8 : 8 + int.from_bytes(self.content[:8], "little")]


class Records:
    """The record files of an export, and those of the registry that goes on from it."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders

    def read(self, record: Record, out: Tensor) -> None:
        """Copies a record's weights into `out` (`layout.empty()`), and checks the copy."""
        target = array_of(out.view(torch.uint8)).reshape(-1)
        try:
            file = self._opened(record.file)
            try:
                count = os.preadv(file, [target.data], record.offset)
            finally:
                os.close(file)
        except OSError as error:
            raise Broken(f"cannot read record {record.file}: {error.strerror}. To mend it, {WAY_OUT}") from None
        if count < len(target) or zlib.crc32(target.data) != record.checksum:
            raise Broken(f"record {record.file} is corrupt (checksum): {WAY_OUT}")

    def weights(self, record: Record) -> list[dict[str, Tensor]]:
        """Returns a copy of a record's weights, by layer: for tools and references."""
        layout = Layout.of(record.layout)
        self.read(record, flat := layout.empty())
        return layout.unpack(flat)

    def path(self, name: str) -> Path:
        """Returns where a file is. If it is missing, where it should be."""
        places = [folder / name for folder in self._folders]
        return next((path for path in places if path.exists()), places[0])

    def _opened(self, name: str) -> int:
        for folder in self._folders:
            with suppress(FileNotFoundError):
                return os.open(folder / name, os.O_RDONLY)
        raise Broken(f"record {name} is missing in {' and '.join(map(str, self._folders))}: {WAY_OUT}")


def pack(parts: Mapping[str, LayoutWeights], tenant: Mapping[str, Any]) -> RecordFile:
    """Returns a record file with these parts. `tenant`: what its header says of the tenant."""
    flat = {name: layout.pack(layers) for name, (layout, layers) in parts.items()}
    layouts = {name: layout.key for name, (layout, _) in sorted(parts.items())}
    header = {"format": FORMAT, "layouts": layouts, "tenant": tenant}
    # One field only: the library writes several in any order, but equal versions give equal files.
    return RecordFile(save(flat, {FIELD: json.dumps(header)}))


def header_of(stored: bytes) -> dict[str, Any]:
    """Returns what the header of a record file says of the tenant."""
    return json.loads(json.loads(stored)["__metadata__"][FIELD])


def read_header(path: Path) -> dict[str, Any]:
    """Reads the header of a record file, and not its weights. Raises one of MISFITS if there is none."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return header_of(file.read(min(size, path.stat().st_size)))


def write(folder: Path, packed: RecordFile) -> Mapping[str, Record]:
    """Writes a record file, and returns its records. Without records there is no file."""
    if packed.records:
        (folder / packed.name).write_bytes(packed.content)
    return packed.records
