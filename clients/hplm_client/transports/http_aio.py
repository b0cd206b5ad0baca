"""HTTP for asyncio, through aiohttp."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from aiohttp.http import HttpProcessingError

from hplm_client.errors import NotConnected, UnexpectedAnswer
from hplm_client.settings import ClientSettings
from hplm_client.tls import NOT_SPOKEN, not_trusted
from hplm_client.transports.http_calls import HttpCalls, Reply
from hplm_client.waiting import within

CONNECTIONS = 256  # of `infer`; further requests wait for a connection, within their time limit

T = TypeVar("T")


class AsyncHttpTransport(HttpCalls):
    def __init__(self, settings: ClientSettings) -> None:
        super().__init__(settings)
        self._inferring = self._session(CONNECTIONS)
        self._others = self._session(0)  # without a limit: a stream would keep others waiting
        self._waits: set[asyncio.Future[Any]] = set()

    def _session(self, limit: int) -> aiohttp.ClientSession:
        context = self._settings.context
        return aiohttp.ClientSession(
            f"{'http' if context is None else 'https'}://{self._settings.address}",
            connector=aiohttp.TCPConnector(ssl=True if context is None else context, limit=limit),
            timeout=aiohttp.ClientTimeout(total=None),  # each request has a limit of its own
            auto_decompress=False,
            skip_auto_headers=["accept-encoding"],  # for Triton compresses then
        )

    async def close(self) -> None:
        for wait in self._waits:  # aiohttp would not end those for the next line of a stream
            wait.cancel()
        await self._inferring.close()
        await self._others.close()

    async def in_time(self, work: Awaitable[T], ends: float) -> T:
        """Returns the result of the work. Raises `asyncio.TimeoutError` at that time."""
        wait = asyncio.ensure_future(work)
        self._waits.add(wait)
        wait.add_done_callback(self._waits.discard)
        return await within(wait, ends - time.monotonic())

    @asynccontextmanager
    async def _sent(
        self, method: str, path: str, seconds: float, body: bytes, headers: dict[str, str]
    ) -> AsyncGenerator[Reply]:
        url = self._settings.url
        session = self._inferring if path.endswith("/infer") else self._others
        ends = time.monotonic() + seconds
        try:
            response = await self.in_time(session.request(method, path, data=body or None, headers=headers), ends)
            self._answered = True
            try:
                yield _Reply(response, ends, self)
            finally:
                response.close()
        except asyncio.TimeoutError as error:
            raise self._settings.timed_out(seconds) from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise not_trusted(url, getattr(error.certificate_error, "verify_message", error.certificate_error)) from error
        except aiohttp.ClientConnectorError as error:
            refused = self._settings.context is None or isinstance(error.os_error, ConnectionRefusedError | socket.gaierror)
            raise NotConnected(f"cannot connect to {url} over HTTP: {error}{'' if refused else NOT_SPOKEN}") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # the last if the client was closed between two lines
            raise self._lost(error) from error
        except (ValueError, HttpProcessingError) as error:  # such as a line without an end
            raise UnexpectedAnswer(f"the answer of {url} is not one of Triton's: {error}") from error


@dataclass
class _Reply(Reply):
    transport: AsyncHttpTransport

    async def read(self) -> bytes:
        return await self.transport.in_time(self.response.read(), self.ends)

    async def line(self) -> bytes:
        return await self.transport.in_time(self.response.content.readline(), self.ends)
