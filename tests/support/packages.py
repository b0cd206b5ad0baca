"""Packages of others, as if installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

METADATA = "Metadata-Version: 2.1\nName: a-package\nVersion: 1.0\nProvides-Extra: nowhere\n"


@contextmanager
def installed_package(folder: Path, entry_points: str, **modules: str) -> Iterator[None]:
    """Installs the code of these modules, by name, in an empty folder."""
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)
    info = folder / "a_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(entry_points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
    for name in modules:
        sys.modules.pop(name, None)
