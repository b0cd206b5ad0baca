"""Where a tritonserver and our backends are found: the container's own first, else the embedded one."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

from hplm.errors import HplmError
from hplm.server.embedded import INSTALL, embedded, obstacle
from hplm.server.installation import STUB, Installation

IN_CONTAINERS = Path("/opt/tritonserver/bin/tritonserver")


def find_installation() -> Installation:
    on_path = shutil.which("tritonserver")
    if on_path:
        return _installed(Path(on_path).resolve(), "on PATH")
    if IN_CONTAINERS.is_file():
        return _installed(IN_CONTAINERS, "installed")
    installation = embedded()
    if installation is None:
        raise HplmError(
            f"no tritonserver on PATH nor in {IN_CONTAINERS.parent}, and nvidia-pytriton is not installed: "
            f"run in NVIDIA's container (deploy/README.md){_or_embedded()}"
        )
    return installation


def find_backends() -> Path:
    """The installed `backends` package: a folder a backend."""
    package = importlib.util.find_spec("backends")
    folders = [Path(place) for place in (package.submodule_search_locations or ())] if package else []
    for folder in folders:
        if any(folder.glob("hplm_*/model.py")):
            return folder
    raise HplmError(
        f"our Triton backends are not among the installed packages of {sys.executable}: install hplm there with `pip install`"
    )


def _or_embedded() -> str:
    why_not = obstacle()
    return f"; {why_not}" if why_not else f", or install the embedded one with `{INSTALL}`"


def _installed(binary: Path, description: str) -> Installation:
    stock = binary.parent.parent / "backends"
    stub = stock / "python" / STUB
    if not stub.is_file():
        raise HplmError(f"{binary} has no Python backend ({stub} is missing): use an image with it, such as *-py3")
    built_for = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if built_for and built_for[1].decode() != ours:
        raise HplmError(
            f"the Python backend of {binary} runs Python {built_for[1].decode()}, hplm is installed for {ours}: "
            f"install it with python{built_for[1].decode()} -m pip"
        )
    return Installation(binary, description, stock)
