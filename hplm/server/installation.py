"""A tritonserver on this machine, and the folder that puts our backends beside its own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

STUB = "triton_python_backend_stub"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # of this process, which the stub must be of too


@dataclass(frozen=True)
class Installation:
    binary: Path
    description: str
    stock_backends: Path  # its own backends, including the Python backend
    stub: Path | None = None  # the Python backend's interpreter process, if it is not beside the backend
    library_folders: tuple[Path, ...] = ()  # libraries that binary and stub would not find by themselves
    library_links: Mapping[str, Path] = field(default_factory=dict[str, Path])  # the same for single libraries, by name

    def lay_out(self, folder: Path, *backends: Path) -> None:
        """Fills `folder` with links to all backends: Triton takes one --backend-directory for its own backends and ours."""
        target = self.backend_directory(folder)
        target.mkdir()
        stock = _folders(self.stock_backends)
        # Triton refuses a link to a Python backend: its libraries must be inside the directory.
        python = shutil.copytree(stock.pop("python"), target / "python")
        if self.stub is not None:
            shutil.copyfile(self.stub, python / STUB).chmod(0o755)  # some installers lose the mode
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
        """Returns the environment of the server, with our Python first on PATH.

        The stub finds its modules as any embedded Python does: beside the first `python3` on PATH.
        """
        environment = dict(inherited)
        environment["PATH"] = _joined(Path(sys.executable).parent, inherited.get("PATH"))
        if self.library_links or self.library_folders:
            # Single links instead of libpython's whole folder, which may contain another libstdc++ or CUDA.
            environment["LD_LIBRARY_PATH"] = _joined(folder / "lib", *self.library_folders, inherited.get("LD_LIBRARY_PATH"))
        return environment


def _folders(parent: Path) -> dict[str, Path]:
    return {path.name: path.resolve() for path in parent.iterdir() if path.is_dir() and path.name[0] not in "_."}


def _joined(*parts: Path | str | None) -> str:
    return ":".join(str(part) for part in parts if part)
