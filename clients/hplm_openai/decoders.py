"""The backbones of one Triton, which the gateway asks over gRPC: decoders for text, and all for their tenants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from hplm_client import generation, wire
from hplm_client.answer import Tenant
from hplm_client.errors import ConnectionFailed, NoBackbone, NoTenant
from hplm_client.generation import Listing, Outputs
from hplm_client.settings import ClientSettings
from hplm_client.transports.grpc import AsyncGrpcTransport
from hplm_openai.completion_request import CompletionRequest
from hplm_openai.errors import OnlyEncoders

SECONDS_KNOWN = 5.0  # how long the server's list of models is used; it changes when models are loaded
SECONDS_TO_FIND = 10.0
MOST_HOMES = 10_000  # tenants whose decoder is remembered


class Models(NamedTuple):
    decoders: list[str]
    encoders: list[str]


class Decoders:
    """Belongs to the event loop in which it is made."""

    def __init__(self, url: str, named: Sequence[str], seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`named`: the decoders to ask; empty: all of the server. `seconds` limit the wait for each part of an answer."""
        self._transport = AsyncGrpcTransport(ClientSettings(url, "grpc"))
        self._named = list(named)
        self._seconds, self._clock = seconds, clock
        self._known: Models | None = None
        self._known_at = 0.0
        self._renewing: asyncio.Task[Models] | None = None
        self._homes: dict[tuple[str, str | None], str] = {}  # the decoder of a tenant and its key, the oldest first

    async def opened(self, key: str | None) -> list[Tenant]:
        """Returns the tenants that a key opens, sorted, each of the first backbone that has it."""
        decoders, encoders = await self._models()
        found = await asyncio.gather(*(self._listed(name, None, key, name in encoders) for name in [*decoders, *encoders]))
        by_name = {tenant.name: tenant for tenants in reversed(found) for tenant in tenants}
        return [by_name[name] for name in sorted(by_name)]

    async def find(self, tenant: str, key: str | None) -> Tenant:
        """Returns one of these tenants, with its labels."""
        decoders, encoders = await self._models()
        names = [*decoders, *encoders]
        listings = (self._listed(name, tenant, key, name in encoders) for name in names)
        for found in await asyncio.gather(*listings, return_exceptions=True):
            if isinstance(found, BaseException):
                if not isinstance(found, NoTenant):
                    raise found
            elif found:
                return found[0]
        raise NoTenant("no such tenant") if names else NoBackbone("the server has no backbone that is ready")

    async def ask(self, request: CompletionRequest) -> AsyncGenerator[Outputs]:
        """Yields the responses of the first decoder that has the tenant. To close the generator cancels the request."""
        while True:
            home, is_remembered = await self._home(request.tenant, request.key)
            async with aclosing(self._transport.generate(home, request, request.timeout_us, self._seconds)) as responses:
                try:
                    first = generation.first_response(await anext(responses, None), home)
                except (NoTenant, NoBackbone):  # no backbone: it was unloaded meanwhile
                    self._homes.pop((request.tenant, request.key), None)
                    if not is_remembered:
                        raise
                    continue
                yield first
                async for response in responses:
                    yield response
                return

    async def ready(self) -> bool:
        try:
            return await self._transport.ready(None, SECONDS_TO_FIND)
        except ConnectionFailed:
            return False

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        await self._transport.close()

    async def _home(self, tenant: str, key: str | None) -> tuple[str, bool]:
        """Returns the decoder to ask for a tenant, and whether it is from memory.

        Of several decoders it is the first that lists the tenant: a listing is not counted, while a request that a decoder
        refuses counts as one for an unknown tenant. A tenant that none lists is asked for at a decoder, which refuses it.
        """
        decoders, encoders = await self._models()
        if not decoders:
            if encoders:
                raise OnlyEncoders(f"the server has no decoder, only encoders: {', '.join(encoders)}")
            raise NoBackbone("the server has no decoder that is ready")
        if len(decoders) == 1:
            return decoders[0], False
        if (known := self._homes.get((tenant, key))) in decoders:
            return known, True
        refusing: list[str] = []
        listings = (self._listed(name, tenant, key) for name in decoders)
        for name, found in zip(decoders, await asyncio.gather(*listings, return_exceptions=True), strict=True):
            if isinstance(found, NoTenant):
                refusing.append(name)
            elif isinstance(found, BaseException):
                raise found
            elif found:
                self._homes[tenant, key] = name
                if len(self._homes) > MOST_HOMES:
                    del self._homes[next(iter(self._homes))]
                return name, False
        return [*refusing, *decoders][0], False

    async def _listed(self, name: str, tenant: str | None, key: str | None, is_encoder: bool = False) -> list[Tenant]:
        """Returns the tenants of a backbone that a key opens. `tenant`: only this one."""
        try:
            if is_encoder:
                request = wire.encode_listing(tenant, key)
                return wire.listed_in(await self._transport.infer(name, request, None, SECONDS_TO_FIND), name)
            listing = Listing(tenant=tenant or "", key=key)
            responses = [one async for one in self._transport.generate(name, listing, None, SECONDS_TO_FIND)]
            return generation.listed_in(responses, name)
        except NoBackbone:  # it was unloaded meanwhile
            return []

    async def _models(self) -> Models:
        """Returns the models to ask. One task at a time renews the list; others use the old one meanwhile, if any."""
        if self._named:
            return Models(self._named, [])
        now, renewing = self._clock(), self._renewing
        if renewing is None or renewing.done():
            if self._known is not None and now - self._known_at < SECONDS_KNOWN:
                return self._known
            self._known_at = now
            renewing = self._renewing = asyncio.create_task(self._renewed())
        elif self._known is not None:
            return self._known
        return await asyncio.shield(renewing)  # others may wait for it too

    async def _renewed(self) -> Models:
        statistics = await self._transport.statistics(SECONDS_TO_FIND)
        others = wire.others_in(statistics)
        are_decoders = await asyncio.gather(*map(self._is_decoder, others))
        decoders = [name for name, is_decoder in zip(others, are_decoders, strict=True) if is_decoder]
        self._known = Models(decoders, wire.backbones_in(statistics))
        return self._known

    async def _is_decoder(self, model: str) -> bool:
        try:
            return generation.reads_prompts(await self._transport.metadata(model, SECONDS_TO_FIND))
        except NoBackbone:  # it was unloaded meanwhile
            return False
