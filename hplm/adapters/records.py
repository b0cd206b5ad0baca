"""Record files: the head, the adapter and the exits of one version of a tenant, each as one tensor of a safetensors file.

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
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from hplm.adapters.layout import Layout
from hplm.adapters.record import Record, file_name
from hplm.errors import Broken
from hplm.model.tensors import array_of

FORMAT = 1
WAY_OUT = (
    "restore the state with `hplm restore`, update the tenant with `hplm tenant update`, or export the repository again with "
    "--replace"
)

Part = tuple[Layout, Sequence[Mapping[str, Tensor]]]  # with the tensors of each layer


@dataclass(frozen=True)
class Packed:
    """The content of a record file, and the records in it by the names of their parts."""

    name: str
    content: bytes
    records: Mapping[str, Record]


class Records:
    """The record files of an export, and those of the live state that goes on from it."""

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


def pack(parts: Mapping[str, Part], unique: str = "") -> Packed:
    """Returns a record file with these parts. `unique`: what its name begins with, so that it is not used twice."""
    flat = {name: layout.pack(layers) for name, (layout, layers) in parts.items()}
    layouts = {name: layout.key for name, (layout, _) in sorted(parts.items())}
    # One field only: the library writes several in any order, but equal weights give equal files.
    content = save(flat, {"hplm": json.dumps({"format": FORMAT, "layouts": layouts})})
    begin = 8 + int.from_bytes(content[:8], "little")
    file = file_name(content, unique)
    records: dict[str, Record] = {}
    for name, entry in json.loads(content[8:begin]).items():
        if name in parts:
            start, end = (begin + offset for offset in entry["data_offsets"])
            records[name] = Record(file, parts[name][0].key, start, zlib.crc32(memoryview(content)[start:end]))
    return Packed(file, content, records)


def write(folder: Path, parts: Mapping[str, Part]) -> Mapping[str, Record]:
    """Writes a record file with these parts, and returns its records. Without parts there is no file."""
    if not parts:
        return {}
    packed = pack(parts)
    (folder / packed.name).write_bytes(packed.content)
    return packed.records
