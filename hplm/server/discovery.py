"""Finds a tritonserver and our backends. A container's own server comes first, then the embedded one."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import sys
from importlib.metadata import entry_points
from pathlib import Path

from hplm.errors import HplmError
from hplm.server.embedded import INSTALL, embedded, obstacle
from hplm.server.installation import PYTHON, STUB, Installation

GROUP = "hplm.backends"  # entry-point group: packages register Triton backends here
IN_CONTAINERS = Path("/opt/tritonserver/bin/tritonserver")


def find_installation(in_containers: Path = IN_CONTAINERS) -> Installation:
    on_path = shutil.which("tritonserver")
    if on_path:
        return _installed(Path(on_path).resolve(), "on PATH")
    if in_containers.is_file():
        return _installed(in_containers, "installed")
    installation = embedded()
    if installation is None:
        why_not = obstacle(platform.machine(), *platform.libc_ver())
        more = f"; {why_not}" if why_not else f", or install the embedded one with `{INSTALL}`"
        raise HplmError(
            f"no tritonserver on PATH or in {in_containers.parent}, and nvidia-pytriton is not installed: "
            f"run in NVIDIA's container (deploy/README.md){more}"
        )
    return installation


def find_backends() -> tuple[Path, ...]:
    """Returns the folders that contain backends: the `backends` package, then those of other installed packages."""
    ours = _folder_of("backends")
    if ours is None:
        raise HplmError(f"the package `backends` is not installed for {sys.executable}: install hplm there with `pip install`")
    others = (_folder_of(point.value) for point in entry_points(group=GROUP))
    return ours, *(folder for folder in others if folder is not None)


def _folder_of(package: str) -> Path | None:
    """Returns a package's folder, or None if it is registered but not installed, as research in the container image."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # its parent package is missing too
        return None
    folders = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    return next((folder for folder in folders if any(folder.glob("*/model.py"))), None)


def _installed(binary: Path, description: str) -> Installation:
    stock = binary.parent.parent / "backends"
    stub = stock / "python" / STUB
    if not stub.is_file():
        raise HplmError(f"{binary} has no Python backend ({stub} is missing): use an image with it, such as *-py3")
    built_for = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    if built_for and built_for[1].decode() != PYTHON:
        raise HplmError(
            f"the Python backend of {binary} runs Python {built_for[1].decode()}, but hplm is installed for {PYTHON}: "
            f"install it with python{built_for[1].decode()} -m pip"
        )
    return Installation(binary, description, stock)
