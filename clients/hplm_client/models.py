"""The models of a server, and the tenants that each has."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from hplm_client import generation, wire
from hplm_client.answer import Tenant
from hplm_client.errors import NoBackbone

if TYPE_CHECKING:
    from hplm_client.transports.grpc import GrpcCalls
    from hplm_client.transports.http_calls import HttpCalls

    Transport = HttpCalls | GrpcCalls


class Models(NamedTuple):
    """The models that answer clients, sorted."""

    decoders: list[str]
    encoders: list[str]


async def models_of(transport: Transport, seconds: float) -> Models:
    """Returns the models that are ready. `seconds` limit each call."""
    statistics = await transport.statistics(seconds)
    decoders: list[str] = []
    for name in wire.others_in(statistics):
        with suppress(NoBackbone):  # it was unloaded meanwhile
            if generation.reads_prompts(await transport.metadata(name, seconds)):
                decoders.append(name)
    return Models(decoders, wire.backbones_in(statistics))


async def tenants_of(
    transport: Transport, model: str, is_decoder: bool, tenant: str | None, key: str | None, seconds: float
) -> list[Tenant]:
    """Returns the tenants of a model that a key opens. `tenant`: only this one, with its labels."""
    if is_decoder:
        responses = transport.generate(model, generation.Listing(tenant=tenant or "", key=key), None, seconds)
        return generation.listed_in([one async for one in responses], model)
    return wire.listed_in(await transport.infer(model, wire.encode_listing(tenant, key), None, seconds), model)
