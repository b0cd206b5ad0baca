"""The four ways to send requests to a server, behind one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hplm_client import AsyncHplmClient, HplmClient

WAYS = ("http", "grpc", "http-asyncio", "grpc-asyncio")


@dataclass(frozen=True)
class Way:
    """One protocol, blocking or asyncio. Calls look the same; the asyncio ones run in a loop and a client of their own."""

    protocol: str
    is_async: bool

    def call(self, url: str, use: Callable[[Any], Any], **settings: Any) -> Any:
        """Returns the result of `use(client)`, awaited with asyncio."""
        if not self.is_async:
            with HplmClient(url, self.protocol, **settings) as client:
                return use(client)

        async def in_loop() -> Any:
            async with AsyncHplmClient(url, self.protocol, **settings) as client:
                return await use(client)

        return asyncio.run(in_loop())
