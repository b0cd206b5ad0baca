"""The client for threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from hplm_client import transports, wire
from hplm_client.answer import Answer
from hplm_client.errors import ConnectionFailed, Forbidden, HplmClientError, NoBackbone, SafeToRetry
from hplm_client.settings import Protocol, Settings


class HplmClient:
    """Asks one server, over HTTP or gRPC. Any number of threads may use one client, without waiting for each other.

    url              HOST:PORT of the protocol (Triton's defaults: 8000 for HTTP, 8001 for gRPC)
    backbone         None: found on first use, if the server has just one
    api_key          sent as `authorization: Bearer KEY`
    network_timeout  seconds for a request without a deadline; with a deadline, one second longer than that
    retries          attempts after the first, for refusals that are safe to repeat (see SafeToRetry); 0 turns them off
    """

    def __init__(
        self,
        url: str,
        protocol: Protocol = "http",
        backbone: str | None = None,
        api_key: str | None = None,
        network_timeout: float = 30.0,
        retries: int = 2,
    ) -> None:
        self._settings = Settings(url, protocol, api_key, network_timeout, retries)
        self._backbone = backbone
        self._transport = transports.blocking(self._settings)
        self._closed = False

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
    ) -> Answer:
        """Returns the answer for one text.

        `deadline_ms` counts from now and includes retries. None means the tenant's default.
        """
        return self.infer_batch(
            [text],
            tenant=tenant,
            pairs=None if pair is None else [pair],
            deadline_ms=deadline_ms,
            top_k=top_k,
            truncate=truncate,
            priority=priority,
            logits=logits,
        )[0]

    def infer_batch(
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
    ) -> list[Answer]:
        """Returns an answer for each text, in order. All texts are one request: they succeed or fail together."""
        question = wire.Question(texts, tenant, pairs, top_k, truncate, priority, logits)
        attempts = self._settings.attempts(deadline_ms)  # includes the time to find the backbone
        self._check_open()
        arguments = wire.encode(question, self._transport.library)
        while True:
            try:
                backbone = self._find_backbone(attempts.network_s)
                arguments["timeout"] = attempts.timeout_us
                return wire.decode(self._transport.infer(backbone, arguments, attempts.network_s), question)
            except SafeToRetry as error:
                pause = attempts.pause_s(error)
            time.sleep(pause)

    @property
    def backbone(self) -> str:
        """The name of the backbone. Asks the server if none was given."""
        self._check_open()
        return self._find_backbone(self._settings.network_timeout)

    def backbones(self) -> list[str]:
        """Returns the backbones that are ready on the server."""
        self._check_open()
        return wire.backbones_in(self._transport.statistics(self._settings.network_timeout))

    def ready(self) -> bool:
        """Whether the server, and the backbone if one is known, take requests. False if they cannot be reached."""
        self._check_open()
        try:
            return self._transport.ready(self._backbone, self._settings.network_timeout)
        except ConnectionFailed:
            return False

    def close(self) -> None:
        self._closed = True
        self._transport.close()

    def _find_backbone(self, seconds: float) -> str:
        if self._backbone is None:
            try:
                statistics = self._transport.statistics(min(seconds, self._settings.network_timeout))
                self._backbone = wire.only_backbone(wire.backbones_in(statistics))
            except Forbidden as error:
                raise NoBackbone(f"the server does not list its backbones ({error}): name one with `backbone`") from error
        return self._backbone

    def _check_open(self) -> None:
        if self._closed:
            raise HplmClientError("this client is closed: make a new one")

    def __enter__(self) -> HplmClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
