"""The decoders of one Triton, which the gateway asks over gRPC."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from hplm_client import generation, wire
from hplm_client.errors import ConnectionFailed, NoBackbone, NoTenant, UnexpectedAnswer
from hplm_client.generation import Outputs
from hplm_client.settings import Settings
from hplm_client.transports.grpc import AsyncGrpcTransport
from hplm_openai.requests import Asked, opened_by

SECONDS_KNOWN = 5.0  # how long the server's list of decoders is used; it changes when models are loaded
SECONDS_TO_FIND = 10.0


class Decoders:
    """Belongs to the event loop in which it is made."""

    def __init__(self, url: str, named: Sequence[str], seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`named`: the decoders to ask; empty: all of the server. `seconds` limit the wait for each part of an answer."""
        self._transport = AsyncGrpcTransport(Settings(url, "grpc"))
        self._named = list(named)
        self._seconds, self._clock = seconds, clock
        self._known: list[str] | None = None
        self._known_at = 0.0
        self._renewing: asyncio.Task[list[str]] | None = None

    async def opened(self, key: str | None) -> dict[str, str]:
        """Returns the tenants that a key opens, each with its decoder."""
        names = await self._names()
        found = await asyncio.gather(*(self._opened(name, key) for name in names))
        # The first decoder of a tenant answers it.
        return {tenant: name for name, tenants in reversed(list(zip(names, found, strict=True))) for tenant in tenants}

    async def ask(self, asked: Asked) -> AsyncGenerator[Outputs]:
        """Yields the responses of the first decoder that has the tenant. To close the generator cancels the request."""
        refused: NoTenant | NoBackbone = NoBackbone("the server has no decoder that is ready")
        for name in await self._names():
            async with aclosing(self._transport.generate(name, asked, asked.timeout_us, self._seconds)) as responses:
                try:
                    first = generation.begun(await anext(responses, None), name)
                except (NoTenant, NoBackbone) as error:  # no backbone: it was unloaded meanwhile
                    refused = error if isinstance(refused, NoBackbone) else refused
                    continue
                yield first
                async for response in responses:
                    yield response
                return
        raise refused

    async def ready(self) -> bool:
        try:
            return await self._transport.ready(None, SECONDS_TO_FIND)
        except ConnectionFailed:
            return False

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        await self._transport.close()

    async def _opened(self, name: str, key: str | None) -> list[str]:
        try:
            responses = [one async for one in self._transport.generate(name, opened_by(key), None, SECONDS_TO_FIND)]
            return [one["tenant"] for one in json.loads(responses[0][generation.OUTPUT][0])]
        except NoBackbone:  # it was unloaded meanwhile
            return []
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise UnexpectedAnswer(f"model {name!r} does not say which tenants it has: is it a decoder of hPLM?") from error

    async def _names(self) -> list[str]:
        """Returns the decoders to ask. One task at a time renews the list; others use the old one meanwhile, if any."""
        if self._named:
            return self._named
        now, renewing = self._clock(), self._renewing
        if renewing is None or renewing.done():
            if self._known is not None and now - self._known_at < SECONDS_KNOWN:
                return self._known
            self._known_at = now
            renewing = self._renewing = asyncio.create_task(self._renewed())
        elif self._known is not None:
            return self._known
        return await asyncio.shield(renewing)  # others may wait for it too

    async def _renewed(self) -> list[str]:
        models = wire.others_in(await self._transport.statistics(SECONDS_TO_FIND))
        are_decoders = await asyncio.gather(*map(self._is_decoder, models))
        self._known = [name for name, is_decoder in zip(models, are_decoders, strict=True) if is_decoder]
        return self._known

    async def _is_decoder(self, model: str) -> bool:
        try:
            return generation.reads_prompts(await self._transport.metadata(model, SECONDS_TO_FIND))
        except NoBackbone:  # it was unloaded meanwhile
            return False
