"""The four ways to ask with a client of ours: over HTTP and gRPC, blocking and with asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from hplm_client import AsyncHplmClient, HplmClient

WAYS = ("http", "grpc", "http-asyncio", "grpc-asyncio")


@dataclass(frozen=True)
class Way:
    """One protocol, blocking or asyncio. Calls look the same; the asyncio ones run in a loop and a client of their own."""

    protocol: str
    is_async: bool = False

    def url(self, server: Any) -> str:
        return server.http_url if self.protocol == "http" else server.grpc_url

    def call(self, url: str, use: Callable[[Any], Any], **settings: Any) -> Any:
        """Returns the result of `use(client)`, awaited with asyncio."""
        if not self.is_async:
            with HplmClient(url, self.protocol, **settings) as client:
                return use(client)

        async def in_loop() -> Any:
            async with AsyncHplmClient(url, self.protocol, **settings) as client:
                return await use(client)

        return asyncio.run(in_loop())

    def run(self, url: str, use: Callable[[Any], Any], **settings: Any) -> Any:
        """Returns what `use(client)` returns in a loop. A blocking client is asked by a thread for each call."""

        async def in_loop() -> Any:
            if self.is_async:
                async with AsyncHplmClient(url, self.protocol, **settings) as client:
                    return await use(client)
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))
            with HplmClient(url, self.protocol, **settings) as client:
                return await use(_InThreads(client))

        return asyncio.run(in_loop())


class _InThreads:
    def __init__(self, client: HplmClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return functools.partial(asyncio.to_thread, getattr(self._client, name))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    protocol, _, kind = request.param.partition("-")
    return Way(protocol, kind == "asyncio")


def infer(client: Any, text: str = "a", **asked: Any) -> Any:
    return client.infer(text, **{"tenant": "acme", **asked})


def ready(client: Any) -> Any:
    return client.ready()


def generate(client: Any, prompt: str | None = "a", **asked: Any) -> Any:
    return client.generate(prompt, **{"tenant": "acme", **asked})


def read(client: Any, prompt: str | None = "a", **asked: Any) -> Any:
    """Reads a whole stream."""
    pieces = client.stream(prompt, **{"tenant": "acme", **asked})
    return _drained(pieces) if hasattr(pieces, "__anext__") else list(pieces)


async def _drained(pieces: Any) -> list[Any]:
    return [piece async for piece in pieces]
