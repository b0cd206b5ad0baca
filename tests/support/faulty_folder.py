"""A registry in a folder, of which any object may be away or missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hplm.registry.folder import Folder


class FaultyFolder(Folder):
    """`fault` hears the name of each object before it is read or written, and may raise."""

    def __init__(self, path: Path, fault: Callable[[str], None] = lambda name: None) -> None:
        super().__init__(path)
        self.fault = fault

    def get(self, name: str) -> bytes:
        self.fault(name)
        return super().get(name)

    def fetch(self, name: str, to: Path) -> None:
        self.fault(name)
        super().fetch(name, to)

    def put(self, name: str, content: bytes | Path) -> None:
        self.fault(name)
        super().put(name, content)
