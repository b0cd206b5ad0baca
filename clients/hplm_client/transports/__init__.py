"""The four ways to a server: HTTP and gRPC, blocking and asyncio. They move encoded questions and name what went wrong.

All have `library` (where tensors of their protocol are made), `infer`, `ready`, `statistics` and `close`.
Imports wait until a protocol is chosen: gRPC and aiohttp take a while to load and most programs need one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hplm_client.settings import Settings

if TYPE_CHECKING:
    from hplm_client.transports.grpc import GrpcTransport
    from hplm_client.transports.grpc_aio import AsyncGrpcTransport
    from hplm_client.transports.http import HttpTransport
    from hplm_client.transports.http_aio import AsyncHttpTransport

    Transport = HttpTransport | GrpcTransport
    AsyncTransport = AsyncHttpTransport | AsyncGrpcTransport


def blocking(settings: Settings) -> Transport:
    if settings.protocol == "http":
        from hplm_client.transports.http import HttpTransport

        return HttpTransport(settings)
    from hplm_client.transports.grpc import GrpcTransport

    return GrpcTransport(settings)


def asynchronous(settings: Settings) -> AsyncTransport:
    """To be called in the event loop that will use it."""
    if settings.protocol == "http":
        from hplm_client.transports.http_aio import AsyncHttpTransport

        return AsyncHttpTransport(settings)
    from hplm_client.transports.grpc_aio import AsyncGrpcTransport

    return AsyncGrpcTransport(settings)
