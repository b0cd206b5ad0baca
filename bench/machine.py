"""Describes the machine on which a figure was measured."""

from __future__ import annotations

import os
import platform
import statistics
import time

import torch

from hplm.placement.measuring import fingerprint

PRODUCT = 768  # rows and columns
MEASURED_S = 0.4


def machine() -> dict[str, str | int | float]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    own = {"cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1), "python": platform.python_version()}
    return {**fingerprint(), **own}


def gflops(seconds: float = MEASURED_S) -> float:
    """Returns the median speed of small fp32 matrix products. It shows how much of the machine other programs leave to us."""
    x = torch.randn(PRODUCT, PRODUCT)
    _ = x @ x
    rates, end = [], time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        start = time.perf_counter()
        _ = x @ x
        rates.append(2 * PRODUCT**3 / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates)
