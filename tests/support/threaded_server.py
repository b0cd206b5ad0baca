"""A server on asyncio in a thread of its own, for tests that call it from another one."""

from __future__ import annotations

import asyncio
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

from typing_extensions import Self

from tests.support.wait import PATIENCE


class ThreadedServer(ABC):
    """Serves while the `with` block runs."""

    def __init__(self, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self.connections = 0
        self.port = port
        self._host = host
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @abstractmethod
    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection until it ends."""

    def __enter__(self) -> Self:
        self._thread.start()
        self.listener = self._call(asyncio.start_server(self._serve, self._host, self.port, ssl=self._tls))
        self.port = self.listener.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await self._answer(reader, writer)

    async def _end(self) -> None:
        self.listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
