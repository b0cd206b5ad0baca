"""The backbones of one Triton, which the gateway asks over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from hplm_client import AsyncHplmClient, generation
from hplm_client.answer import Answer, Tenant
from hplm_client.calls import NONE
from hplm_client.errors import ConnectionFailed, NoBackbone, NoTenant
from hplm_client.generation import Outputs
from hplm_client.models import Models, models_of, tenants_of
from hplm_client.settings import ClientSettings
from hplm_client.transports.grpc import AsyncGrpcTransport
from hplm_client.wire import Value
from hplm_openai.completion_request import CompletionRequest
from hplm_openai.endpoints import WRITES, Endpoint, Tasks, wrong_task

SECONDS_KNOWN = 5.0  # how long the server's lists of models and tenants are used; they change
SECONDS_TO_FIND = 10.0
NONE_READY = "the server has no backbone that is ready"
T = TypeVar("T")
MOST_HOMES = 10_000  # tenants whose backbone is remembered


class Backbones:
    """Belongs to the event loop in which it is made."""

    def __init__(self, url: str, named: Sequence[str], seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`named`: the decoders to ask; empty: all of the server. `seconds` limit the wait for each part of an answer."""
        self._url, self._transport = url, AsyncGrpcTransport(ClientSettings(url, "grpc"))
        self._clients: dict[str, AsyncHplmClient] = {}  # of encoders
        self._named = list(named)
        self._seconds, self._clock = seconds, clock
        self._known: Models | None = None
        self._known_at = 0.0
        self._renewing: asyncio.Task[Models] | None = None
        # The tenant with this name, key, and one of these tasks, and when it was found; the oldest first.
        self._homes: dict[tuple[str, str | None, Tasks], tuple[Tenant, float]] = {}

    async def opened(self, key: str | None) -> list[Tenant]:
        """Returns the tenants that a key opens, sorted, each of the first backbone that has it."""
        decoders, encoders = await self._models()
        found = await asyncio.gather(*(self._listed(name, None, key) for name in [*decoders, *encoders]))
        by_name = {tenant.name: tenant for tenants in reversed(found) for tenant in tenants}
        return [by_name[name] for name in sorted(by_name)]

    async def find(self, tenant: str, key: str | None) -> Tenant:
        """Returns one of these tenants, with its labels."""
        decoders, encoders = await self._models()
        found = await self._first([*decoders, *encoders], tenant, key, None)
        if not found.task:
            raise NoTenant("no such tenant") if found.backbone else NoBackbone(NONE_READY)
        return found

    async def ask(self, request: CompletionRequest) -> AsyncGenerator[Outputs]:
        """Yields the responses of the first decoder that has the tenant. To close the generator cancels the request."""

        async def begin(home: Tenant) -> tuple[Outputs, AsyncGenerator[Outputs]]:
            responses = self._transport.generate(home.backbone, request, request.timeout_us, self._seconds)
            return generation.first_response(await anext(responses, None), home.backbone), responses

        first, responses = await self._at_home(request.tenant, request.key, WRITES, begin)
        async with aclosing(responses):
            yield first
            async for response in responses:
                yield response

    async def infer(
        self, endpoint: Endpoint, body: Mapping[str, Any], tenant: str, key: str | None, id: str, more: Mapping[str, Value]
    ) -> Any:
        """Returns the answer of an endpoint by the first encoder that has the tenant. `more`: parameters."""

        async def answer(home: Tenant) -> Any:
            async def ask(parameters: Mapping[str, Value] = NONE, **asked: Any) -> list[Answer]:
                own = {"tenant": tenant, "api_key": key, "request_id": id, "parameters": {**parameters, **more}}
                return await self._client(home.backbone).infer_batch(**asked, **own)

            if not home.task:  # the backbone counts and refuses it
                await ask(texts=["a"])
                raise NoTenant("no such tenant")
            return await endpoint.answer(body, home, ask)

        return await self._at_home(tenant, key, endpoint.tasks, answer)

    async def _at_home(self, tenant: str, key: str | None, tasks: Tasks, act: Callable[[Tenant], Awaitable[T]]) -> T:
        """Returns what `act` does with the tenant; once more if it is not where it was found before."""
        while True:
            home, is_remembered = await self._home(tenant, key, tasks)
            try:
                return await act(home)
            except (NoTenant, NoBackbone):  # no backbone: it was unloaded meanwhile
                self._homes.pop((tenant, key, tasks), None)
                if not is_remembered:
                    raise

    def _client(self, backbone: str) -> AsyncHplmClient:
        """Sends nothing again: whoever asks the gateway decides."""
        if backbone not in self._clients:
            self._clients[backbone] = AsyncHplmClient(self._url, "grpc", backbone, network_timeout=self._seconds, retries=0)
        return self._clients[backbone]

    async def ready(self) -> bool:
        try:
            return await self._transport.ready(None, SECONDS_TO_FIND)
        except ConnectionFailed:
            return False

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        for one in (self._transport, *self._clients.values()):
            await one.close()

    async def _home(self, tenant: str, key: str | None, tasks: Tasks) -> tuple[Tenant, bool]:
        """Returns the tenant of the first backbone that lists one with such a task, and whether it is from memory.

        A listing is not counted, while a request that a backbone refuses counts as one for an unknown tenant. A tenant that
        none lists has no task, and is asked for at a backbone, which refuses it.
        """
        models = await self._models()
        names, others = models if tasks == WRITES else reversed(models)
        known, known_at = self._homes.get((tenant, key, tasks), (None, 0.0))
        if known is not None and known.backbone in names and self._clock() - known_at < SECONDS_KNOWN:
            return known, True
        found = await self._first(names, tenant, key, tasks)
        if found.task in tasks:
            self._homes.pop((tenant, key, tasks), None)  # the oldest come first
            self._homes[tenant, key, tasks] = found, self._clock()
            if len(self._homes) > MOST_HOMES:
                del self._homes[next(iter(self._homes))]
        elif (other := found if found.task else await self._first(others, tenant, key, None)).task:
            raise wrong_task(other)
        elif not names:
            raise NoTenant("no such tenant") if others else NoBackbone(NONE_READY)
        return found, False

    async def _first(self, names: Sequence[str], tenant: str, key: str | None, tasks: Tasks | None) -> Tenant:
        """Returns the tenant of the first backbone that lists it, with one of these tasks if there is such a one; None: any.

        If none lists it: without a task, of a backbone that refuses it.
        """
        refusing, others = list[str](), list[Tenant]()
        listings = (self._listed(name, tenant, key) for name in names)
        for name, found in zip(names, await asyncio.gather(*listings, return_exceptions=True), strict=True):
            if isinstance(found, NoTenant):
                refusing.append(name)
            elif isinstance(found, BaseException):
                raise found
            elif found and (tasks is None or found[0].task in tasks):
                return found[0]
            else:
                others += found
        return [*others, Tenant(tenant, "", [*refusing, *names, ""][0])][0]

    async def _listed(self, name: str, tenant: str | None, key: str | None) -> list[Tenant]:
        """Returns the tenants of a backbone that a key opens. `tenant`: only this one."""
        is_decoder = self._known is None or name not in self._known.encoders
        try:
            return await tenants_of(self._transport, name, is_decoder, tenant, key, SECONDS_TO_FIND)
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
        self._known = await models_of(self._transport, SECONDS_TO_FIND)
        return self._known
