"""The calls of both clients, written once as coroutines: what is sent, what answers mean, and when a request is sent again."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hplm_client import generation, wire
from hplm_client.answer import Answer, Tenant
from hplm_client.errors import (
    OF_A_DECODER,
    OF_AN_ENCODER,
    OF_VECTORS,
    ConnectionFailed,
    HplmClientError,
    LateAnswer,
    NoBackbone,
    NoTenant,
    SafeToRetry,
    advising,
    listing,
)
from hplm_client.generation import Generated, Messages, Outputs, Piece, Prompt
from hplm_client.models import models_of, tenants_of
from hplm_client.retry import Attempts
from hplm_client.settings import ClientSettings, Protocol

if TYPE_CHECKING:
    from hplm_client.models import Transport

NONE: Mapping[str, wire.Value] = MappingProxyType({})
T = TypeVar("T")
One = TypeVar("One")
Many = TypeVar("Many")
Whole = TypeVar("Whole")
Stream = TypeVar("Stream")


class Calls(Generic[One, Many, Whole, Stream]):
    """The calls that have arguments. The types are what they return: an answer, answers, generated text and its pieces.

    A client says which transport it has now. One that blocks also says how coroutines run and how it pauses.
    """

    def __init__(
        self,
        url: str,
        protocol: Protocol = "http",
        backbone: str | None = None,
        api_key: str | None = None,
        network_timeout: float = 30.0,
        retries: int = 2,
        ca_file: str | os.PathLike[str] | None = None,
        late_is_error: bool = False,
    ) -> None:
        self._settings = ClientSettings(url, protocol, api_key, network_timeout, retries, ca_file)
        self._late_is_error = late_is_error
        if backbone is not None:
            wire.encoded("backbone", backbone)
        self._named = backbone
        self._encoder: str | None = None  # both are found on first use, if no backbone was named
        self._decoders: list[str] = []
        self._closed = False
        self._begin()

    def infer(
        self,
        text: str,
        *,
        tenant: str,
        pair: str | None = None,
        deadline_ms: float | None = None,
        top_k: int | None = None,
        truncate: bool = False,
        priority: int | None = None,
        logits: bool = False,
        confidence: bool = False,
        embedding: bool = False,
        tokens: bool = False,
        api_key: str | None = None,
        request_id: str | None = None,
        parameters: Mapping[str, wire.Value] = NONE,
    ) -> One:
        """Returns the answer for one text.

        `deadline_ms` counts from now and includes retries. None means the tenant's default. An answer that comes later is
        marked `late`. `embedding`: a tenant of the task embed answers with a vector. `parameters`: others of docs/api.md, such
        as {"hplm_rung": 2}.
        """
        more = (top_k, truncate, priority, logits, confidence, embedding, tokens, api_key, request_id, parameters)

        def asked() -> wire.TenantTexts:
            pairs = None if pair is None else wire.texts_in("pair", [pair])
            return wire.TenantTexts(wire.texts_in("text", [text]), tenant, pairs, *more)

        return self._run(self._answer(deadline_ms, asked))

    def infer_batch(
        self,
        texts: Iterable[str],
        *,
        tenant: str,
        pairs: Iterable[str] | None = None,
        deadline_ms: float | None = None,
        top_k: int | None = None,
        truncate: bool = False,
        priority: int | None = None,
        logits: bool = False,
        confidence: bool = False,
        embedding: bool = False,
        tokens: bool = False,
        api_key: str | None = None,
        request_id: str | None = None,
        parameters: Mapping[str, wire.Value] = NONE,
    ) -> Many:
        """Returns an answer for each text, in order. If one fails, all fail.

        They are one request, or several in turn if they are more than a request may have. `deadline_ms` is for all of them.
        """
        more = (top_k, truncate, priority, logits, confidence, embedding, tokens, api_key, request_id, parameters)

        def asked() -> wire.TenantTexts:
            seconds = None if pairs is None else wire.texts_in("pairs", pairs)
            return wire.TenantTexts(wire.texts_in("texts", texts), tenant, seconds, *more)

        return self._run(self._answers(deadline_ms, asked))

    def generate(
        self,
        prompt: str | None = None,
        *,
        tenant: str,
        messages: Messages | None = None,
        deadline_ms: float | None = None,
        truncate: bool = False,
        priority: int | None = None,
        api_key: str | None = None,
        request_id: str | None = None,
        **sampling: Any,
    ) -> Whole:
        """Returns a decoder's whole answer. `sampling`: `max_tokens`, `temperature` and the others of docs/generation.md.

        `messages`, instead of a prompt, are those of a chat: [{"role": "user", "content": "Hello"}, ...].
        `deadline_ms` counts from now and includes retries. What was generated by then is the answer.
        """
        more = (truncate, priority, api_key, request_id)
        return self._run(self._generated(deadline_ms, lambda: Prompt(prompt, messages, tenant, sampling, False, *more)))

    def stream(
        self,
        prompt: str | None = None,
        *,
        tenant: str,
        messages: Messages | None = None,
        deadline_ms: float | None = None,
        truncate: bool = False,
        priority: int | None = None,
        api_key: str | None = None,
        request_id: str | None = None,
        **sampling: Any,
    ) -> Stream:
        """Yields a decoder's answer while it grows. To close the iterator cancels the request.

        Only the wait for the first part is repeated, and `network_timeout` limits the wait for each part.
        """
        more = (truncate, priority, api_key, request_id)
        asked = Prompt(prompt, messages, tenant, sampling, True, *more)
        return self._iterated(generation.pieces_in(self._responses(asked, deadline_ms)))

    def _begin(self) -> None:
        """Makes what a client needs before its first call."""

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Returns what a call returns: here the coroutine itself, which the caller awaits."""
        return work

    def _iterated(self, pieces: AsyncGenerator[Piece]) -> Any:
        """Returns an iterator over the same pieces."""
        return pieces

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _own(self) -> Transport:
        """Returns the transport of this client."""
        raise NotImplementedError

    def _transport(self) -> Transport:
        if self._closed:
            raise HplmClientError("this client is closed: make a new one")
        return self._own()

    async def _answer(self, deadline_ms: float | None, asked: Callable[[], wire.TenantTexts]) -> Answer:
        return (await self._answers(deadline_ms, asked))[0]

    async def _answers(self, deadline_ms: float | None, asked: Callable[[], wire.TenantTexts]) -> list[Answer]:
        attempts = self._settings.attempts(deadline_ms)
        answers: list[Answer] = []
        for part in asked().parts():
            if answers:
                attempts.begin()
            answers += await self._repeated(partial(self._answered, part, wire.encode(part)), attempts)
        if attempts.late_s <= 0:
            return answers
        answers = [replace(answer, late=True) for answer in answers]
        if self._late_is_error:
            late_ms = 1000 * attempts.late_s
            raise LateAnswer(
                f"the answer came {late_ms:.0f} ms after the deadline of {deadline_ms:g} ms: give more time", answers
            )
        return answers

    async def _answered(self, question: wire.TenantTexts, request: wire.InferRequest, attempts: Attempts) -> list[Answer]:
        transport, backbone = self._transport(), await self._find_backbone(attempts.network_s)
        with (
            advising(OF_A_DECODER, "a decoder answers, so use generate or stream"),
            advising(OF_VECTORS, "a vector answers, so give embedding=True"),
        ):
            result = await transport.infer(backbone, request, attempts.timeout_us, attempts.network_s)
        return wire.decode(result, question)

    async def _generated(self, deadline_ms: float | None, asked: Callable[[], Prompt]) -> Generated:
        return generation.whole_in([response async for response in self._responses(asked(), deadline_ms)])

    async def _responses(self, prompt: Prompt, deadline_ms: float | None) -> AsyncGenerator[Outputs]:
        transport = self._transport()

        async def attempt(attempts: Attempts) -> tuple[Outputs, AsyncGenerator[Outputs]]:
            backbone = await self._find_decoder(prompt.tenant, prompt.key, attempts.network_s)
            timeout_us, seconds = attempts.timeout_us, attempts.network_s
            responses = transport.generate(backbone, prompt, timeout_us, seconds, attempts.part_s)
            with advising(OF_AN_ENCODER, "an encoder answers, so use infer"):
                return generation.first_response(await anext(responses, None), backbone), responses

        first, responses = await self._repeated(attempt, self._settings.attempts(deadline_ms))
        async with aclosing(responses):
            yield first
            async for response in responses:
                yield response

    async def _repeated(self, attempt: Callable[[Attempts], Awaitable[T]], attempts: Attempts) -> T:
        """Returns the result of the first attempt that is not refused. The time to find the backbone counts too."""
        while True:
            try:
                return await attempt(attempts)
            except SafeToRetry as error:
                pause = attempts.pause_s(error)
            await self._pause(pause)

    async def _is_ready(self) -> bool:
        transport = self._transport()
        try:
            return await transport.ready(self._named or self._encoder, self._settings.network_timeout)
        except ConnectionFailed:
            return False

    async def _backbones(self) -> list[str]:
        return wire.backbones_in(await self._transport().statistics(self._settings.network_timeout))

    async def _tenants(self, tenant: str | None, key: str | None) -> list[Tenant]:
        if tenant is not None:
            wire.check_tenant(tenant)
        wire.check_key(key)
        found: list[Tenant] = []
        refused: NoTenant | None = None
        for backbone, is_decoder in await self._listing():
            try:
                found += await self._listed(backbone, is_decoder, tenant, key, self._settings.network_timeout)
            except NoTenant as error:
                refused = error
        if refused is not None and not found:
            raise refused
        return found

    async def _listing(self) -> list[tuple[str, bool]]:
        """Returns the models that list tenants, and which are known to be decoders."""
        if self._named is not None:
            return [(self._named, False)]
        with listing("backbones"):
            decoders, encoders = await models_of(self._transport(), self._settings.network_timeout)
        return [*((name, False) for name in encoders), *((name, True) for name in decoders)]

    async def _listed(
        self, backbone: str, is_decoder: bool, tenant: str | None, key: str | None, seconds: float
    ) -> list[Tenant]:
        try:
            return await tenants_of(self._transport(), backbone, is_decoder, tenant, key, seconds)
        except HplmClientError as error:
            if is_decoder or not any(sign in str(error) for sign in OF_A_DECODER):
                raise
        return await tenants_of(self._transport(), backbone, True, tenant, key, seconds)

    async def _find_backbone(self, seconds: float = math.inf) -> str:
        transport, seconds = self._transport(), min(seconds, self._settings.network_timeout)
        if self._named is not None:
            return self._named
        if self._encoder is None:
            with listing("backbones"):
                names = wire.backbones_in(await transport.statistics(seconds))
            self._encoder = wire.only(names)
        return self._encoder

    async def _find_decoder(self, tenant: str, key: str | None, seconds: float) -> str:
        """Returns the decoder to ask for a tenant: the named or only one, else the first that lists the tenant."""
        transport, seconds = self._transport(), min(seconds, self._settings.network_timeout)
        if self._named is not None and self._named != wire.ALIAS:
            return self._named
        if not self._decoders:
            with listing("models"):
                self._decoders = (await models_of(transport, seconds)).decoders
        if not self._decoders:
            raise NoBackbone("the server has no decoder that is ready: only decoders generate text")
        for decoder in self._decoders[:-1]:
            with suppress(NoTenant, NoBackbone):
                await self._listed(decoder, True, tenant, key, seconds)
                return decoder
        return self._decoders[-1]  # it refuses a tenant that no decoder has
