"""The client for threads."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from hplm_client.answer import Answer, Tenant
from hplm_client.calls import Calls
from hplm_client.generation import Generated, Piece

if TYPE_CHECKING:
    from hplm_client.models import Transport

T = TypeVar("T")


class HplmClient(Calls[Answer, list[Answer], Generated, Generator[Piece]]):
    """Asks one server, over HTTP or gRPC. Any number of threads may use one client, without waiting for each other.

    url              HOST:PORT of the protocol (Triton's defaults: 8000 for HTTP, 8001 for gRPC); https://HOST[:PORT] for TLS
    backbone         None: found on first use, if the server has just one
    api_key          sent as `authorization: Bearer KEY`, where a call gives none
    network_timeout  seconds for a request without a deadline; with a deadline, one second longer than that
    retries          attempts after the first, for refusals that are safe to repeat (see SafeToRetry); 0 turns them off
    ca_file          PEM file: turns TLS on, and trusts the certificates in it instead of the system's
    late_is_error    raises LateAnswer instead of returning an answer that came after `deadline_ms`
    """

    @property
    def backbone(self) -> str:
        """The name of the backbone. Asks the server if none was given."""
        return run_coroutine(self._find_backbone())

    def backbones(self) -> list[str]:
        """Returns the backbones that are ready on the server."""
        return run_coroutine(self._backbones())

    def tenants(self, tenant: str | None = None, *, api_key: str | None = None) -> list[Tenant]:
        """Returns the tenants that the key opens, and those without keys, of the named backbone or of all.

        `tenant`: only this one, with its labels. Raises NoTenant if there is none, or the key does not open it.
        """
        return run_coroutine(self._tenants(tenant, api_key))

    def ready(self) -> bool:
        """Whether the server, and the backbone if one is known, take requests. False if they cannot be reached."""
        return run_coroutine(self._is_ready())

    def close(self) -> None:
        """Closes connections. Calls of other threads still get their answers over HTTP, and raise ConnectionLost over gRPC."""
        self._closed = True
        run_coroutine(self._made.close())

    def _begin(self) -> None:
        # gRPC takes a while to load, and most programs need only one protocol.
        if self._settings.protocol == "http":
            from hplm_client.transports.http import HttpTransport as Transport
        else:
            from hplm_client.transports.grpc import GrpcTransport as Transport
        self._made = Transport(self._settings)

    def _own(self) -> Transport:
        return self._made

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return run_coroutine(work)

    def _iterated(self, pieces: AsyncGenerator[Piece]) -> Generator[Piece]:
        try:
            while True:
                try:
                    piece = run_coroutine(pieces.__anext__())
                except StopAsyncIteration:
                    return
                yield piece
        finally:
            run_coroutine(pieces.aclose())

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def __enter__(self) -> HplmClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in this thread, without an event loop. Those of blocking transports block where others would wait."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("a coroutine of the blocking client waits for an event loop")
