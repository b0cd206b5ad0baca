"""The four transports: HTTP and gRPC, blocking and asyncio. They send encoded questions and raise the client's errors.

All have `library` (which makes tensors for their protocol), `infer`, `ready`, `statistics` and `close`. A transport is imported
when its protocol is chosen: gRPC and aiohttp take a while to load, and most programs need only one of them.
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
    """Makes an asyncio transport. Must be called in the event loop that will use it."""
    if settings.protocol == "http":
        from hplm_client.transports.http_aio import AsyncHttpTransport

        return AsyncHttpTransport(settings)
    from hplm_client.transports.grpc_aio import AsyncGrpcTransport

    return AsyncGrpcTransport(settings)
