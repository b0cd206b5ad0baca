"""The tritonserver inside the `nvidia-pytriton` wheel, and the checks of what it needs from this Python."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from hplm.errors import HplmError
from hplm.server.installation import PYTHON, STUB, Installation

TRITON_VERSION = "2.51.0"  # of the wheel that pyproject.toml names
FOLDERS = tuple(dict.fromkeys([sysconfig.get_config_var("LIBDIR") or "", str(Path(sys.base_prefix) / "lib")]))
INSTALL = "pip install -c constraints.txt 'hplm[embedded]'"


def embedded() -> Installation | None:
    """Returns the embedded server, or None if the wheel is not installed. Raises if the wheel cannot work here."""
    package = importlib.util.find_spec("pytriton")  # does not import it
    if package is None or package.origin is None:
        return None
    numpy = importlib.metadata.version("numpy")
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
        description=f"embedded, from nvidia-pytriton {importlib.metadata.version('nvidia-pytriton')}",
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
