"""OpenMP's threads, among which torch divides a product on a CPU.

Each thread that computes gets threads of its own for that, until it ends. GNU's OpenMP lets them wait actively for the next
product only while all of them together are no more than the processors. Otherwise they sleep and are woken up for each product,
and a small batch takes half as long again. So one thread of a process should compute.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def apart(make: Callable[[], T]) -> T:
    """Calls in a thread that ends, and with it those that computed for it."""
    with ThreadPoolExecutor(1, "make") as thread:
        return thread.submit(make).result()


def compute_with(threads: int) -> None:
    """Divides what the calling thread computes among so many threads."""
    torch.get_num_threads()  # a thread takes over another one's number when it first computes, or here
    torch.set_num_threads(threads)
