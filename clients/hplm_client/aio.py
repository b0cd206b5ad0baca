"""The client for asyncio: the same as HplmClient, awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hplm_client import generation, transports, wire
from hplm_client.answer import Answer
from hplm_client.errors import ConnectionFailed, HplmClientError, SafeToRetry, listing
from hplm_client.generation import Generated, Messages, Outputs, Piece, Prompt
from hplm_client.settings import Protocol, Settings

if TYPE_CHECKING:
    from hplm_client.transports import AsyncTransport


class AsyncHplmClient:
    """HplmClient for asyncio, with the same parameters.

    It belongs to the event loop that first uses it. If a task is cancelled, the client drops its request, but the server may
    still compute it.
    """

    def __init__(
        self,
        url: str,
        protocol: Protocol = "http",
        backbone: str | None = None,
        api_key: str | None = None,
        network_timeout: float = 30.0,
        retries: int = 2,
        tls: bool = False,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._settings = Settings(url, protocol, api_key, network_timeout, retries, tls, ca_file)
        self._named = backbone
        self._encoder: str | None = None  # both are found on first use, if no backbone was named
        self._decoder: str | None = None
        self._bound: tuple[asyncio.AbstractEventLoop, AsyncTransport] | None = None
        self._closed = False

    async def infer(
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
        rung: int | None = None,
        level: bool = False,
    ) -> Answer:
        """Returns the answer for one text.

        `deadline_ms` counts from now and includes retries. None means the tenant's default.
        """
        answers = await self.infer_batch(
            [text],
            tenant=tenant,
            pairs=None if pair is None else [pair],
            deadline_ms=deadline_ms,
            top_k=top_k,
            truncate=truncate,
            priority=priority,
            logits=logits,
            confidence=confidence,
            rung=rung,
            level=level,
        )
        return answers[0]

    async def infer_batch(
        self,
        texts: Sequence[str],
        *,
        tenant: str,
        pairs: Sequence[str] | None = None,
        deadline_ms: float | None = None,
        top_k: int | None = None,
        truncate: bool = False,
        priority: int | None = None,
        logits: bool = False,
        confidence: bool = False,
        rung: int | None = None,
        level: bool = False,
    ) -> list[Answer]:
        """Returns an answer for each text, in order. All texts are one request: they succeed or fail together."""
        question = wire.Question(texts, tenant, pairs, top_k, truncate, priority, logits, confidence, rung, level)
        transport = self._transport()
        attempts = self._settings.attempts(deadline_ms)  # includes the time to find the backbone
        arguments = wire.encode(question, transport.library)
        while True:
            try:
                backbone = await self._find_backbone(attempts.network_s)
                arguments["timeout"] = attempts.timeout_us
                return wire.decode(await transport.infer(backbone, arguments, attempts.network_s), question)
            except SafeToRetry as error:
                pause = attempts.pause_s(error)
            await asyncio.sleep(pause)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        tenant: str,
        messages: Messages | None = None,
        deadline_ms: float | None = None,
        first_token_ms: float | None = None,
        token_ms: float | None = None,
        truncate: bool = False,
        priority: int | None = None,
        **sampling: Any,
    ) -> Generated:
        """Returns a decoder's whole answer, as `HplmClient.generate` does."""
        asked = Prompt(prompt, messages, tenant, sampling, False, first_token_ms, token_ms, truncate, priority)
        return generation.whole_in([response async for response in self._responses(asked, deadline_ms)])

    def stream(
        self,
        prompt: str | None = None,
        *,
        tenant: str,
        messages: Messages | None = None,
        deadline_ms: float | None = None,
        first_token_ms: float | None = None,
        token_ms: float | None = None,
        truncate: bool = False,
        priority: int | None = None,
        **sampling: Any,
    ) -> AsyncIterator[Piece]:
        """Yields a decoder's answer while it grows, as `HplmClient.stream` does. To close the iterator cancels the request."""
        asked = Prompt(prompt, messages, tenant, sampling, True, first_token_ms, token_ms, truncate, priority)
        return generation.async_pieces_in(self._responses(asked, deadline_ms))

    async def _responses(self, prompt: Prompt, deadline_ms: float | None) -> AsyncGenerator[Outputs]:
        transport = self._transport()
        attempts = self._settings.attempts(deadline_ms)
        while True:
            try:
                backbone = await self._find_decoder(attempts.network_s)
                responses = self._ask(transport, backbone, prompt, attempts.timeout_us, attempts.network_s)
                with generation.before_the_first_part(prompt, backbone):
                    first = generation.begun(await anext(responses, None), backbone)
                break
            except SafeToRetry as error:
                pause = attempts.pause_s(error)
            await asyncio.sleep(pause)
        async with aclosing(responses):
            yield first
            async for response in responses:
                yield response

    async def _ask(
        self, transport: AsyncTransport, backbone: str, prompt: Prompt, timeout_us: int | None, seconds: float
    ) -> AsyncGenerator[Outputs]:
        if prompt.goes_by_infer(backbone):
            arguments = prompt.arguments(transport.library, timeout_us)
            yield generation.outputs_in(await transport.infer(backbone, arguments, seconds))
            return
        async with aclosing(transport.generate(backbone, prompt, timeout_us, seconds)) as responses:
            async for response in responses:
                yield response

    async def backbone(self) -> str:
        """Returns the name of the backbone. Asks the server if none was given."""
        return await self._find_backbone(self._settings.network_timeout)

    async def backbones(self) -> list[str]:
        """Returns the backbones that are ready on the server."""
        return wire.backbones_in(await self._transport().statistics(self._settings.network_timeout))

    async def ready(self) -> bool:
        """Whether the server, and the backbone if one is known, take requests. False if they cannot be reached."""
        transport = self._transport()
        try:
            return await transport.ready(self._named or self._encoder, self._settings.network_timeout)
        except ConnectionFailed:
            return False

    async def close(self) -> None:
        self._closed = True
        if self._bound is not None:
            await self._bound[1].close()

    async def _find_backbone(self, seconds: float) -> str:
        if self._named is not None:
            return self._named
        if self._encoder is None:
            with listing("backbones"):
                statistics = await self._transport().statistics(min(seconds, self._settings.network_timeout))
                names = wire.backbones_in(statistics)
            self._encoder = wire.only_backbone(names)
        return self._encoder

    async def _find_decoder(self, seconds: float) -> str:
        if self._named is not None:
            return self._named
        if self._decoder is None:
            transport, seconds = self._transport(), min(seconds, self._settings.network_timeout)
            with listing("models"):
                names = wire.others_in(await transport.statistics(seconds))
                found = [name for name in names if generation.reads_prompts(await transport.metadata(name, seconds))]
            self._decoder = generation.only_decoder(found)
        return self._decoder

    def _transport(self) -> AsyncTransport:
        if self._closed:
            raise HplmClientError("this client is closed: make a new one")
        loop = asyncio.get_running_loop()
        if self._bound is None:
            self._bound = (loop, transports.asynchronous(self._settings))
        if self._bound[0] is not loop:
            raise HplmClientError("this client belongs to another event loop: make one client for each loop")
        return self._bound[1]

    async def __aenter__(self) -> AsyncHplmClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
