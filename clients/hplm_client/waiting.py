"""Waits in asyncio with a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(work: Awaitable[T], seconds: float) -> T:
    """Returns the result of the work, or raises `asyncio.TimeoutError`.

    `asyncio.wait_for` does so too, but before Python 3.12 it loses a cancelling that comes together with the result.
    """
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({working}, timeout=seconds)
        if working.done():
            return working.result()
        raise asyncio.TimeoutError
    finally:
        if not working.cancel() and not working.cancelled():
            working.exception()  # otherwise asyncio logs an error that nobody waits for any more
