"""The client for asyncio: the same as HplmClient, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from hplm_client.answer import Answer, Tenant
from hplm_client.calls import Calls
from hplm_client.errors import HplmClientError
from hplm_client.generation import Generated, Piece

if TYPE_CHECKING:
    from hplm_client.models import Transport

T = TypeVar("T")
Awaited = Coroutine[Any, Any, T]


class AsyncHplmClient(Calls[Awaited[Answer], Awaited[list[Answer]], Awaited[Generated], AsyncGenerator[Piece]]):
    """HplmClient for asyncio, with the same parameters.

    It belongs to the event loop that first uses it. If a task is cancelled, the client drops its request, but the server may
    still compute it.
    """

    _bound: tuple[asyncio.AbstractEventLoop, Transport] | None = None

    async def backbone(self) -> str:
        """Returns the name of the backbone. Asks the server if none was given."""
        return await self._find_backbone()

    async def backbones(self) -> list[str]:
        """Returns the backbones that are ready on the server."""
        return await self._backbones()

    async def tenants(self, tenant: str | None = None, *, api_key: str | None = None) -> list[Tenant]:
        """Returns the tenants that the key opens, and those without keys, of the named backbone or of all.

        `tenant`: only this one, with its labels. Raises NoTenant if there is none, or the key does not open it.
        """
        return await self._tenants(tenant, api_key)

    async def ready(self) -> bool:
        """Whether the server, and the backbone if one is known, take requests. False if they cannot be reached."""
        return await self._is_ready()

    async def close(self) -> None:
        """Ends calls that still wait: they raise ConnectionLost."""
        self._closed = True
        if self._bound is not None:
            await self._bound[1].close()

    def _own(self) -> Transport:
        loop = asyncio.get_running_loop()
        if self._bound is None:
            if self._settings.protocol == "http":
                from hplm_client.transports.http_aio import AsyncHttpTransport as Transport
            else:
                from hplm_client.transports.grpc import AsyncGrpcTransport as Transport
            self._bound = (loop, Transport(self._settings))
        if self._bound[0] is not loop:
            raise HplmClientError("this client belongs to another event loop: make one client for each loop")
        return self._bound[1]

    async def __aenter__(self) -> AsyncHplmClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
