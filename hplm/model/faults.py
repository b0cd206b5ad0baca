"""Faults of an accelerator that stay: after one, all that its process asks of it fails. Only another process gets on."""

from __future__ import annotations

import re

import torch

_FAULT = re.compile(r"(?:CUDA|HIP) error: ")
_NO_MEMORY = re.compile(r"out of memory|ALLOC_FAILED")


def stays(error: Exception) -> bool:
    """Whether an error is such a fault. Some that would pass count too: to start another process costs seconds."""
    said = str(error)
    is_fault = isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and _FAULT.match(said) is not None)
    return is_fault and not _NO_MEMORY.search(said)
