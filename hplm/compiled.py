"""Loads compiled kernels: `kernel.c` in some rooms, beside the `kernel.py` that calls it through ctypes.

They are compiled where hplm is installed and a C compiler is found. Where one is missing, slower Python does the same. What
several of them share is in `hplm/model/kernel.h`.
"""

from __future__ import annotations

import ctypes
import logging
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)
NAME = "_kernel" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")

K = TypeVar("K")


class Functions:
    """The functions of a library that has `hplm/model/kernel.h`. The kernel of a room says the types of those that it calls."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.instructions = int(self._library.hplm_instructions())

    def _function(
        self, name: str, *arguments: Any, result: Any = None, library: ctypes.CDLL | None = None
    ) -> Callable[..., Any]:
        """`library`: the same, opened in another way."""
        found = getattr(library or self._library, name)
        found.argtypes, found.restype = arguments, result
        return found


def library(caller: str) -> Path:
    """Returns where the library of a `kernel.py` is."""
    return Path(caller).with_name(NAME)


def opened(path: Path, version: int, kernel: Callable[[Path], K], instead: str) -> K | None:
    """Returns the kernel, or None if its library is missing or has another version. Then it logs what happens instead."""
    try:
        found = int(ctypes.CDLL(str(path)).hplm_version())
        if found != version:
            raise OSError(f"{path} has version {found} instead of {version}")
        return kernel(path)
    except (OSError, AttributeError) as error:
        log.warning(
            "a compiled kernel cannot be loaded: %s. %s. Install hplm again where a C compiler is found", error, instead
        )
        return None


def parallel() -> int | None:
    """Returns the address of OpenMP's function that starts threads, or None if there is none in this process.

    Its threads are those of torch. Others would compete with them for the cores. Import torch first.
    """
    found = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value
