"""Measures functions in turn, so that a machine that drifts or is shared slows down all of them alike, and describes it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import torch
from tqdm import tqdm

from hplm.memory import machine_memory
from hplm.placement.measuring import fingerprint

LEAST_ROUNDS = 3
TURN = 0.01  # seconds of a turn, at least one call: so a variant has the CPU's caches and predictions to itself
PRODUCT = 768  # rows and columns of a matrix
PRODUCTS_S = 0.4  # how long products are measured
APART = 37  # texts between the variants, so that none finds in the caches what another one has just read


def alternate(variants: Mapping[str, Callable[[int], object]], seconds: float, warm_up: int = 1) -> dict[str, float]:
    """Calls each variant with the number of a text, for `seconds`. Returns its median time in microseconds.

    A variant that prepares something before what is measured returns its own time, as a float of seconds. The first `warm_up`
    calls do not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for text in range(warm_up):
        for variant in variants.values():
            variant(text)
    end, rounds = time.perf_counter() + seconds * len(variants), 0
    while rounds < LEAST_ROUNDS or time.perf_counter() < end:
        for number, (name, variant) in enumerate(variants.items()):
            turn, now = time.perf_counter() + TURN, 0.0
            while now < turn:
                start = time.perf_counter()
                own = variant(len(taken[name]) + APART * number)
                now = time.perf_counter()
                taken[name].append(own if isinstance(own, float) else now - start)
        rounds += 1
    return {name: 1e6 * median(times) for name, times in taken.items()}


def in_turn(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Returns the median of what each variant returns. The first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for turn in tqdm(range(rounds + 1), desc=" and ".join(variants)):
        for name, variant in variants.items():
            value = variant()
            if turn:
                found[name].append(value)
    return {name: median(values) for name, values in found.items()}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine() -> dict[str, str | int | float]:
    memory, cores = machine_memory()[0] / 2**30, len(os.sched_getaffinity(0))
    own = {"cores": cores, "memory_gib": round(memory, 1), "python": platform.python_version()}
    return {**fingerprint(), **own}


def gflops(seconds: float = PRODUCTS_S) -> float:
    """Returns the median speed of small fp32 matrix products. It shows how much of the machine other programs leave to us."""
    x = torch.randn(PRODUCT, PRODUCT)
    _ = x @ x
    rates, end = [], time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        start = time.perf_counter()
        _ = x @ x
        rates.append(2 * PRODUCT**3 / (time.perf_counter() - start) / 1e9)
    return median(rates)
