"""HTTP for asyncio, through tritonclient's aiohttp client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable
from typing import Any
from urllib.parse import quote

import aiohttp
import tritonclient.http
import tritonclient.http.aio
from tritonclient.http import InferResult
from tritonclient.utils import InferenceServerException

from hplm_client.errors import ClientTimeout, ConnectionLost, NotConnected, UnexpectedAnswer, refusal
from hplm_client.generation import EVENT, Outputs, Prompt, event_in, object_in
from hplm_client.settings import Settings
from hplm_client.tls import NEEDED, NOT_SPOKEN, not_trusted
from hplm_client.transports.http import expect_ok, tells_no_more
from hplm_client.waiting import within

CONNECTIONS = 256  # of `infer`; further requests wait for a connection, within their time limit


class AsyncHttpTransport:
    library = tritonclient.http

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._answered = False
        self._own: aiohttp.ClientSession | None = None
        # `_call` limits the time of each request. aiohttp's own limit would be the same for all requests.
        unlimited: Any = None  # aiohttp accepts None, which tritonclient's annotations do not say
        self._client = tritonclient.http.aio.InferenceServerClient(
            settings.address,
            conn_limit=CONNECTIONS,
            conn_timeout=unlimited,
            ssl=settings.context is not None,
            ssl_context=settings.context,
        )

    async def infer(self, backbone: str, arguments: dict[str, Any], seconds: float) -> InferResult:
        headers = self._settings.headers_for(arguments["parameters"])
        return await self._call(self._client.infer(backbone, headers=headers, **arguments), seconds)

    async def generate(self, backbone: str, prompt: Prompt, timeout_us: int | None, seconds: float) -> AsyncGenerator[Outputs]:
        """Yields responses. `seconds` limit the wait for each. To close the generator closes the connection, which cancels."""
        asked = prompt.body(timeout_us, self._settings.api_key)
        headers = self._settings.headers_for(prompt.parameters())
        response = await self._call(self._session.post(prompt.path(backbone), data=asked, headers=headers), seconds)
        try:
            if response.status != 200 or not prompt.stream:
                body = (await self._call(response.read(), seconds)).removeprefix(EVENT)
                expect_ok(response.status, body, self._settings.url)
                yield object_in(body, self._settings.url)
                return
            while line := await self._call(response.content.readline(), seconds):
                if (event := event_in(line, self._settings.url)) is not None:
                    yield event
        finally:
            response.close()

    async def metadata(self, model: str, seconds: float) -> dict[str, Any]:
        return await self._json(f"/v2/models/{quote(model, safe='')}", seconds)

    async def ready(self, backbone: str | None, seconds: float) -> bool:
        status, _ = await self._get("/v2/health/ready", seconds)
        if status != 200 or backbone is None:
            return status == 200
        status, body = await self._get(f"/v2/models/{quote(backbone, safe='')}/ready", seconds)
        return status == 200 or tells_no_more(status, body)

    async def statistics(self, seconds: float) -> dict[str, Any]:
        return await self._json("/v2/models/stats", seconds)

    async def close(self) -> None:
        await self._client.close()
        if self._own is not None:
            await self._own.close()

    async def _json(self, path: str, seconds: float) -> dict[str, Any]:
        status, body = await self._get(path, seconds)
        expect_ok(status, body, self._settings.url)
        return object_in(body, self._settings.url)

    async def _get(self, path: str, seconds: float) -> tuple[int, bytes]:
        async with await self._call(self._session.get(path, headers=self._settings.headers), seconds) as response:
            return response.status, await self._call(response.read(), seconds)

    @property
    def _session(self) -> aiohttp.ClientSession:
        """The session for requests that tritonclient lacks. Each has a connection: a stream would keep others waiting."""
        if self._own is None:
            context = self._settings.context
            self._own = aiohttp.ClientSession(
                f"{'http' if context is None else 'https'}://{self._settings.address}",
                connector=aiohttp.TCPConnector(ssl=True if context is None else context, limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        return self._own

    async def _call(self, request: Awaitable[Any], seconds: float) -> Any:
        url = self._settings.url
        try:
            result = await within(request, seconds)
            self._answered = True
            return result
        except InferenceServerException as error:
            raise refusal(f"{error.message()} (HTTP {error.status()} from {url})", error.status()) from error
        except asyncio.TimeoutError as error:
            raise ClientTimeout(f"no answer from {url} within {seconds:.3g} s") from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise not_trusted(url, getattr(error.certificate_error, "verify_message", error.certificate_error)) from error
        except aiohttp.ClientConnectorError as error:
            refused = self._settings.context is None or isinstance(error.os_error, ConnectionRefusedError | socket.gaierror)
            raise NotConnected(f"cannot connect to {url} over HTTP: {error}{'' if refused else NOT_SPOKEN}") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            advice = "" if self._answered or self._settings.context else NEEDED
            raise ConnectionLost(f"connection to {url} lost after sending ({reason}){advice}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UnexpectedAnswer(f"the answer of {url} is not one of Triton's: {error}") from error
