"""A closed loop: as many requests in flight as keep an engine busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count

Answered = Callable[["list | Exception", tuple], None]


def saturated(send: Callable[[int, Answered], object], in_flight: int, seconds: float) -> float:
    """Returns answers a second. Raises if an answer is an error.

    `send` sends the request of a number, which calls the function when it is answered.
    """
    numbers, answers, failures = count(), count(), []
    end, left = time.perf_counter() + seconds, threading.Semaphore(0)

    def answered(answer: list | Exception, counted: tuple) -> None:
        if isinstance(answer, Exception):
            failures.append(answer)
        elif time.perf_counter() < end and not failures:
            next(answers)
            send(next(numbers), answered)
            return
        left.release()

    start = time.perf_counter()
    for _ in range(in_flight):
        send(next(numbers), answered)
    for _ in range(in_flight):
        left.acquire()
    if failures:
        raise failures[0]
    return (next(answers) + in_flight) / (time.perf_counter() - start)
