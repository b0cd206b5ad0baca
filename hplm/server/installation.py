"""A tritonserver on this machine, and the folder that makes it serve our backends beside its own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    binary: Path
    description: str
    stock_backends: Path  # what came with it; the Python backend is among them
    stub: Path | None = None  # the Python backend's interpreter process, where it does not lie ready beside the backend
    library_folders: tuple[Path, ...] = ()  # what binary and stub would not find by themselves ...
    library_links: Mapping[str, Path] = field(default_factory=dict)  # ... and single libraries, by the name asked for

    def lay_out(self, folder: Path, *backends: Path) -> None:
        """Fills `folder`: Triton takes one --backend-directory, so its own backends and ours must stand side by side."""
        target = self.backend_directory(folder)
        target.mkdir()
        stock = _folders(self.stock_backends)
        self._copy_python_backend(stock.pop("python"), target / "python")
        for found in map(_folders, backends):
            stock |= found
        for backend in stock.values():
            (target / backend.name).symlink_to(backend)
        libraries = folder / "lib"
        libraries.mkdir()
        for name, library in self.library_links.items():
            (libraries / name).symlink_to(library)

    def backend_directory(self, folder: Path) -> Path:
        return folder / "backends"

    def environment(self, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
        """The stub finds its modules as any embedded Python does: beside the first `python3` on PATH, so that is ours."""
        environment = dict(inherited)
        environment["PATH"] = _joined(Path(sys.executable).parent, inherited.get("PATH"))
        if self.library_links or self.library_folders:
            # Single links, not the folder libpython lies in: that may hold a libstdc++ or a CUDA of its own.
            environment["LD_LIBRARY_PATH"] = _joined(folder / "lib", *self.library_folders, inherited.get("LD_LIBRARY_PATH"))
        return environment

    def _copy_python_backend(self, stock: Path, target: Path) -> None:
        """Not a link: for backends written in Python, Triton refuses a library that lies outside the directory."""
        shutil.copytree(stock, target)
        if self.stub is not None:
            shutil.copyfile(self.stub, target / STUB)
            (target / STUB).chmod(0o755)  # which some installers lose


def _folders(parent: Path) -> dict[str, Path]:
    return {path.name: path.resolve() for path in parent.iterdir() if path.is_dir() and path.name[0] not in "_."}


def _joined(*parts: Path | str | None) -> str:
    return ":".join(str(part) for part in parts if part)
