"""HTTP for asyncio, through tritonclient's aiohttp client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import aiohttp
import tritonclient.http
import tritonclient.http.aio
from tritonclient.http import InferResult
from tritonclient.utils import InferenceServerException

from hplm_client.errors import ClientTimeout, ConnectionLost, NotConnected, UnexpectedAnswer, refusal
from hplm_client.settings import Settings

CONNECTIONS = 256  # further requests wait for a connection, within their time limit


class AsyncHttpTransport:
    library = tritonclient.http

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # `_call` limits the time of each request. aiohttp's own limit would be the same for all requests.
        unlimited: Any = None  # aiohttp accepts None, which tritonclient's annotations do not say
        self._client = tritonclient.http.aio.InferenceServerClient(settings.url, conn_limit=CONNECTIONS, conn_timeout=unlimited)

    async def infer(self, backbone: str, arguments: dict[str, Any], seconds: float) -> InferResult:
        # Each request gets a dictionary of its own, because tritonclient adds headers to it.
        return await self._call(self._client.infer(backbone, headers=dict(self._settings.headers), **arguments), seconds)

    async def ready(self, backbone: str | None, seconds: float) -> bool:
        return await self._call(self._client.is_server_ready(headers=self._settings.headers), seconds) and (
            backbone is None or await self._call(self._client.is_model_ready(backbone, headers=self._settings.headers), seconds)
        )

    async def statistics(self, seconds: float) -> dict[str, Any]:
        return await self._call(self._client.get_inference_statistics(headers=self._settings.headers), seconds)

    async def close(self) -> None:
        await self._client.close()

    async def _call(self, request: Awaitable[Any], seconds: float) -> Any:
        url = self._settings.url
        try:
            return await asyncio.wait_for(request, seconds)
        except InferenceServerException as error:
            raise refusal(f"{error.message()} (HTTP {error.status()} from {url})", error.status()) from error
        except asyncio.TimeoutError as error:
            raise ClientTimeout(f"no answer from {url} within {seconds:.3g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise NotConnected(f"cannot connect to {url} over HTTP: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConnectionLost(f"connection to {url} lost after sending ({reason})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UnexpectedAnswer(f"the answer of {url} is not one of Triton's: {error}") from error
