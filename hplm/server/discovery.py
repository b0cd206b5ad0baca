"""Finds a tritonserver and our backends. A container's own server comes first, then that of the wheel `nvidia-pytriton`."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from hplm.errors import HplmError
from hplm.server.installation import PYTHON, STUB, Installation

GROUP = "hplm.backends"  # entry-point group: packages register Triton backends here
IN_CONTAINERS = Path("/opt/tritonserver/bin/tritonserver")
TRITON_VERSION = "2.51.0"  # of the wheel that pyproject.toml names
FOLDERS = tuple(dict.fromkeys([sysconfig.get_config_var("LIBDIR") or "", str(Path(sys.base_prefix) / "lib")]))
INSTALL = "pip install -c constraints.txt 'hplm[embedded]'"


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
    others = (_folder_of(point.value) for point in metadata.entry_points(group=GROUP))
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


def embedded() -> Installation | None:
    """Returns the embedded server, or None if the wheel is not installed. Raises if the wheel cannot work here."""
    package = importlib.util.find_spec("pytriton")  # does not import it
    if package is None or package.origin is None:
        return None
    numpy = metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        raise HplmError(
            f"numpy {numpy} is installed, with which the embedded Triton returns empty tensors without an error: "
            f"install numpy 1.26 with `{INSTALL}`"
        )
    root = Path(package.origin).parent / "tritonserver"
    stub = root / "python_backend_stubs" / PYTHON / STUB
    if not stub.is_file():
        raise HplmError(
            f"the embedded Triton has no stub for Python {PYTHON}: "
            f"use one of {', '.join(sorted(path.name for path in stub.parent.parent.iterdir()))}"
        )
    libraries, library = root.parent.parent / "nvidia_pytriton.libs", libpython()
    # The wheel may have a copy (as for 3.13). With a link for it, the stub loads this Python's library and not the wheel's.
    copies = libraries.glob(f"libpython*.{sys.version_info.minor}.so.1.0")
    return Installation(
        binary=root / "bin" / "tritonserver",
        description=f"embedded, from nvidia-pytriton {metadata.version('nvidia-pytriton')}",
        stock_backends=root / "backends",
        stub=stub,
        library_folders=(libraries,),
        library_links=dict.fromkeys([library.name, *(copy.name for copy in copies)], library),
    )


def obstacle(machine: str, libc: str, version: str) -> str | None:
    """Returns why the wheel cannot run on such a machine with this version of a libc, or None."""
    if machine != "x86_64":
        return f"the embedded Triton needs x86-64, but this machine is {machine}"
    if libc != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < (2, 35):
        return (
            f"the embedded Triton needs glibc 2.35 or later, but this machine has {libc or 'another libc'} {version}".rstrip()
        )
    return None


def libpython(folders: Sequence[str] = FOLDERS) -> Path:
    """Returns the shared library of this interpreter. The stub is a separate Python that must load our modules."""
    name = f"libpython{PYTHON}.so.1.0"
    for folder in folders:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise HplmError(
        f"no shared {name} in {' or '.join(filter(None, folders))}, which the embedded Triton needs to run Python. "
        f"On Debian or Ubuntu: apt-get install libpython{PYTHON}. With pyenv: "
        f"PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install {PYTHON}. "
        "Or make the environment with another Python that has this library"
    )
