"""Waits in asyncio with a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from hplm_client.errors import ConnectionLost

T = TypeVar("T")


async def within(work: Awaitable[T], seconds: float | None) -> T:
    """Returns the result of the work. Raises `asyncio.TimeoutError`, or ConnectionLost if a closed client cancels the work.

    `asyncio.wait_for` has a limit too, but before Python 3.12 it loses a cancelling that comes together with the result.
    """
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({working}, timeout=seconds)
        if working.cancelled():  # not the task that waits here: the line above would have raised
            raise ConnectionLost("this client was closed before the answer came: make a new one")
        if working.done():
            return working.result()
        raise asyncio.TimeoutError
    finally:
        if not working.cancel() and not working.cancelled():
            working.exception()  # otherwise asyncio logs an error that nobody waits for any more
