"""A folder of good files, of which each case replaces one by a bad one."""

from __future__ import annotations

import json
import struct
from abc import abstractmethod
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from hplm.adapters.bank import PAGE
from hplm.tenants.verification import Part
from tests.fuzz.mutations import dumped, mutated, mutated_json
from tests.fuzz.target import Found, Target, accepts


class Files(Target):
    """A folder of good files, of which a case replaces one."""

    def __init__(self, folder: Path) -> None:
        self.work = folder
        self.folder = self.make(folder)
        self.good = {name: (self.folder / name).read_bytes() for name in self.names()}

    @abstractmethod
    def make(self, folder: Path) -> Path:
        """Makes the good files, and returns their folder."""

    def names(self) -> list[str]:
        """Returns the files that cases replace."""
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())

    @abstractmethod
    def read(self) -> object:
        """Reads the files as the product does."""

    def cases(self):
        return st.sampled_from(sorted(self.good)).flatmap(lambda name: st.tuples(st.just(name), bad(name, self.good[name])))

    def check(self, case):
        name, data = case
        path = self.folder / name
        path.unlink()  # the file before may still be mapped
        path.write_bytes(data)
        try:
            accepts(self.read, self.work, broken=True)
        finally:
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.good[name])


def bad(name: str, data: bytes) -> SearchStrategy[bytes]:
    """Returns bad versions of a file. What is JSON in it stays JSON in most of them."""
    if name.endswith(".safetensors"):
        size = struct.unpack_from("<Q", data)[0]
        header = mutated_json(json.loads(data[8 : 8 + size])).map(dumped)
        return st.one_of(header.map(lambda text: struct.pack("<Q", len(text)) + text + data[8 + size :]), mutated(data))
    if name.endswith(".bank"):
        header = mutated_json(json.loads(data[:PAGE].rstrip(b"\0"))).map(dumped)
        return st.one_of(header.map(lambda text: text[:PAGE].ljust(PAGE, b"\0") + data[PAGE:]), mutated(data))
    if name.endswith(".jsonl"):
        lines = [json.loads(line) for line in data.splitlines()]
        several = st.lists(st.one_of(st.sampled_from(lines), st.sampled_from(lines).flatmap(mutated_json)), max_size=3)
        return st.one_of(several.map(lambda some: b"\n".join(map(dumped, some))), mutated(data))
    try:
        good = json.loads(data)
    except ValueError:
        return mutated(data)
    changed = mutated_json(good)
    return st.one_of(changed.map(dumped), changed.map(dumped), mutated(data))


def verified(part: Part) -> None:
    for said in part.check(part.path, lambda size: None):
        if len(said.encode("utf-8", "surrogateescape")) > 2048:
            raise Found(f"a message of {len(said):,} characters: {said[:100]!r}")
