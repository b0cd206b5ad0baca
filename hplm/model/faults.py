"""Errors of a device that say more than that a computation failed: it has no memory, or a fault stays.

After a fault that stays, all that its process asks of an accelerator fails. Only another process gets on.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress

import torch

from hplm.errors import HplmError, OutOfCapacity, for_client

log = logging.getLogger(__name__)
_FAULT = re.compile(r"(?:CUDA|HIP) error: ")
_NO_MEMORY = re.compile(r"out of memory|ALLOC_FAILED")


def stays(error: Exception) -> bool:
    """Whether an error is such a fault. Some that would pass count too: to start another process costs seconds."""
    return _is_of_accelerator(error) and not _NO_MEMORY.search(str(error))


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device has no memory. Then the device also gets back what torch keeps for later."""
    if isinstance(error, torch.OutOfMemoryError) or (_is_of_accelerator(error) and _NO_MEMORY.search(str(error))):
        with suppress(RuntimeError):  # while kernels are recorded (`hplm.engine.graphs`) torch may refuse
            torch.cuda.empty_cache()
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's words on a CPU


def failure(doing: str, error: Exception, advice: str = "") -> HplmError:
    """Logs why something failed. Returns the error that clients get. `advice`: what to do where the device has no memory."""
    log.error("%s failed", doing, exc_info=error)
    told = for_client(error, doing)
    return OutOfCapacity(f"{told}{advice}") if is_out_of_memory(error) else told  # torch's own are no MemoryError


def _is_of_accelerator(error: Exception) -> bool:
    told = isinstance(error, RuntimeError) and _FAULT.match(str(error)) is not None
    return told or isinstance(error, torch.AcceleratorError)
