"""Loads compiled kernels: `kernel.c` in some rooms, beside the `kernel.py` that calls it through ctypes.

They are compiled where hplm is installed and a C compiler is found. Where one is missing, slower Python does the same.
"""

from __future__ import annotations

import ctypes
import logging
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)
NAME = "_kernel" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")

K = TypeVar("K")


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
