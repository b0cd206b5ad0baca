"""OpenMP's threads, among which torch divides a product on a CPU.

Each thread that computes gets threads of its own for that, until it ends. GNU's OpenMP lets them wait actively for the next
product only while all of them together are no more than the processors. Otherwise they sleep and are woken up for each product,
and a small batch takes half as long again. So one thread of a process should compute, and beside it only threads that
divide no product.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from hplm.model.malloc import share_one_arena

T = TypeVar("T")


def apart(make: Callable[[], T]) -> T:
    """Calls `make` in a thread of its own, which then ends, and its OpenMP threads with it."""
    share_one_arena()  # before there is a second thread
    with ThreadPoolExecutor(1, "make") as thread:
        return thread.submit(make).result()


def compute_with(threads: int) -> None:
    """Divides what the calling thread computes among so many threads."""
    torch.get_num_threads()  # with its first use a thread takes over the number that another one has set: here, and not later
    torch.set_num_threads(threads)
