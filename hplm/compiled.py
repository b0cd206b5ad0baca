"""The compiled kernels: `kernel.c` in some rooms, in one library that Python calls through ctypes.

It is compiled where hplm is installed and a C compiler is found. Where it is missing, numpy, torch and Python do the same,
and tests hold both together. What the kernels share is in `hplm/model/kernel.h`.
"""

from __future__ import annotations

import ctypes
import logging
import sysconfig
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import cache, cached_property
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
LIBRARY = Path(__file__).with_name("model") / ("_kernel" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
VERSION = 7  # of its functions, as in hplm/model/kernel.c

HOW = ("parallel", c_void_p), ("threads", c_int64), ("instructions", c_int64)  # what most structures begin with


class Kernel:
    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        if (found := int(self.library.hplm_version())) != VERSION:
            raise OSError(f"{path} has version {found} instead of {VERSION}")
        self.holding = ctypes.PyDLL(str(path))  # the same: its functions keep the interpreter's lock
        self.instructions = int(self.library.hplm_instructions())
        self.has_bf16 = bool(self.library.hplm_has_bf16())

    def how(self, threads: int) -> tuple[int | None, int, int]:
        """Returns the fields of HOW."""
        return self._parallel, threads, self.instructions

    @cached_property
    def _parallel(self) -> int | None:
        """The address of OpenMP's function that starts threads, or None if there is none in this process.

        Its threads are those of torch, which must be imported. Others would compete with them for the cores.
        """
        found = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
        return None if found is None else ctypes.cast(found, c_void_p).value


@cache
def kernel() -> Kernel | None:
    """Returns the kernels, or None if they were not compiled. Says so once."""
    try:
        return Kernel(LIBRARY)
    except (OSError, AttributeError) as error:
        log.warning(
            "the compiled kernels cannot be loaded: %s. Numpy, torch and Python compute instead: serving takes several times "
            "as long, and the screen of `hplm place search` a hundred times. Install hplm again where a C compiler is found",
            error,
        )
        return None


def vectors() -> Kernel | None:
    """Returns the kernels if this processor has the instructions for those that compute."""
    found = kernel()
    return found if found is not None and found.instructions else None


def declared(function: Any, *arguments: Any) -> Callable[..., int]:
    """Returns a function of the library that takes arguments of these types, and returns a number."""
    function.argtypes, function.restype = arguments, c_int64
    return function


def pointer_fields(*names: str) -> tuple[tuple[str, Any], ...]:
    """Returns fields of a structure that hold addresses."""
    return tuple((name, c_void_p) for name in names)


def number_fields(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, c_int64) for name in names)
