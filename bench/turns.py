"""Times short functions in turn, so that a machine that drifts or is shared slows down all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

LEAST_ROUNDS = 3
TURN = 0.01  # seconds of a turn, at least one call: so a variant has the CPU's caches and predictions to itself
APART = 37  # texts between the variants, so that none finds in the caches what another one has just read


@dataclass(frozen=True)
class Timing:
    """A function's times."""

    median: float  # microseconds
    rounds: int


def alternate(variants: Mapping[str, Callable[[int], object]], seconds: float, warm_up: int = 1) -> dict[str, Timing]:
    """Calls each variant with the number of a text, for `seconds` in all. The first `warm_up` calls do not count."""

    def timed(variant: Callable[[int], object]) -> Callable[[int], float]:
        def run(text: int) -> float:
            start = time.perf_counter()
            variant(text)
            return time.perf_counter() - start

        return run

    return alternate_timed({name: timed(variant) for name, variant in variants.items()}, seconds, warm_up)


def alternate_timed(variants: Mapping[str, Callable[[int], float]], seconds: float, warm_up: int = 0) -> dict[str, Timing]:
    """Like `alternate`, for variants that return their own time, because they prepare something before each call."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for text in range(warm_up):
        for variant in variants.values():
            variant(text)
    end = time.perf_counter() + seconds * len(variants)
    rounds = 0
    while rounds < LEAST_ROUNDS or time.perf_counter() < end:
        for number, (name, variant) in enumerate(variants.items()):
            turn = time.perf_counter() + TURN
            while True:
                taken[name].append(variant(len(taken[name]) + APART * number))
                if time.perf_counter() >= turn:
                    break
        rounds += 1
    return {name: Timing(1e6 * median(times), len(times)) for name, times in taken.items()}


@contextmanager
def stolen() -> Iterator[Callable[[], float]]:
    """Gives a function that returns the share of CPU time since the beginning that the host gave to other machines."""
    before = _cpu_ticks()

    def share() -> float:
        now = _cpu_ticks()
        return (now[1] - before[1]) / max(1, now[0] - before[0])

    yield share


def _cpu_ticks() -> tuple[int, int]:
    """Returns the CPU ticks of this machine since its start, and how many of them its host gave to other machines."""
    ticks = [int(value) for value in Path("/proc/stat").read_text("ascii").splitlines()[0].split()[1:9]]
    return sum(ticks), ticks[7]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
