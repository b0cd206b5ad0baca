"""The calls over HTTP, for transports that send them: tritonclient makes and reads the bodies."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import tritonclient.http
from tritonclient.http import InferenceServerClient, InferResult

from hplm_client import wire
from hplm_client.errors import ClientTimeout, ConnectionLost, HplmClientError, UnexpectedAnswer, refusal
from hplm_client.generation import EVENT, Outputs, Prompt, event_in, object_in
from hplm_client.settings import ClientSettings
from hplm_client.tls import NEEDED

# The beginning of HTTP/2's first frame, which a gRPC port sends at once, as it is and as aiohttp writes it.
OF_HTTP_2 = ("BadStatusLine: \0\0", r"b'\\x00\\x00")


@dataclass
class Reply(ABC):
    """An answer whose body is still to be read, until the time `ends`."""

    response: Any
    ends: float

    @abstractmethod
    async def read(self) -> bytes:
        """Returns the body."""

    @abstractmethod
    async def line(self) -> bytes:
        """Returns the next line, which is empty at the end. Raises if the body was cut off."""


class HttpCalls:
    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._answered = False

    def _sent(
        self, method: str, path: str, seconds: float, body: bytes, headers: dict[str, str]
    ) -> AbstractAsyncContextManager[Reply]:
        """Sends a request. All waits together end after `seconds`, unless the reply gets more time.

        Failures of the connection, also while the reply is read, raise the client's errors.
        """
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def infer(self, backbone: str, request: wire.InferRequest, timeout_us: int | None, seconds: float) -> InferResult:
        inputs = []
        for name, values in request.inputs.items():
            inputs.append(tritonclient.http.InferInput(name, list(values.shape), "BYTES" if values.dtype == object else "BOOL"))
            inputs[-1].set_data_from_numpy(values)
        outputs = [tritonclient.http.InferRequestedOutput(name) for name in request.outputs]
        body, json_bytes = InferenceServerClient.generate_request_body(
            inputs, outputs, request.id, timeout=timeout_us, parameters=request.parameters
        )
        headers = self._settings.headers(request.parameters, request.key)
        headers["inference-header-content-length"] = str(json_bytes)
        async with self._sent("POST", f"{_model(backbone)}/infer", seconds, body, headers) as reply:
            answer = await reply.read()
        expect_ok(reply.response.status, answer, self._settings.url)
        length = reply.response.headers.get("inference-header-content-length")  # how many bytes are JSON
        try:
            return InferenceServerClient.parse_response_body(answer, header_length=None if length is None else int(length))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UnexpectedAnswer(f"the answer of {self._settings.url} is not one of Triton's: {answer[:80]!r}") from error

    async def generate(
        self, backbone: str, prompt: Prompt, timeout_us: int | None, seconds: float, part_s: float | None = None
    ) -> AsyncGenerator[Outputs]:
        """Yields responses. `seconds` limit the wait for each, `part_s` for later ones. To close it cancels the request."""
        path = f"{_model(backbone)}/{'generate_stream' if prompt.stream else 'generate'}"
        headers = self._settings.headers(prompt.parameters(), prompt.key)
        body = prompt.body(timeout_us, self._settings.bearer(prompt.key))
        try:
            async with self._sent("POST", path, seconds, body, headers) as reply:
                if reply.response.status == 200 and prompt.stream:
                    while line := await reply.line():
                        if (event := event_in(line, self._settings.url)) is not None:
                            yield event
                        seconds = part_s or seconds
                        reply.ends = time.monotonic() + seconds
                    return
                answer = (await reply.read()).removeprefix(EVENT)
        except ClientTimeout as error:  # maybe of a later part
            raise self._settings.timed_out(seconds) from error
        expect_ok(reply.response.status, answer, self._settings.url)
        yield object_in(answer, self._settings.url)

    async def ready(self, backbone: str | None, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        status, _ = await self._get("/v2/health/ready", seconds)
        if status != 200 or backbone is None:
            return status == 200
        status, answer = await self._get(f"{_model(backbone)}/ready", ends - time.monotonic())
        # The front door does not tell the state of models. Triton itself has other answers.
        return status == 200 or (status == 404 and b"[invalid_input]" in answer)

    async def statistics(self, seconds: float) -> dict[str, Any]:
        return await self._json("/v2/models/stats", seconds)

    async def metadata(self, model: str, seconds: float) -> dict[str, Any]:
        return await self._json(_model(model), seconds)

    async def _json(self, path: str, seconds: float) -> dict[str, Any]:
        status, answer = await self._get(path, seconds)
        expect_ok(status, answer, self._settings.url)
        return object_in(answer, self._settings.url)

    async def _get(self, path: str, seconds: float) -> tuple[int, bytes]:
        async with self._sent("GET", path, seconds, b"", self._settings.headers()) as reply:
            return reply.response.status, await reply.read()

    def _lost(self, error: Exception) -> HplmClientError:
        reason = f"{type(error).__name__}: {error}"
        if any(settings in reason for settings in OF_HTTP_2):
            return self._settings.of_another_protocol()
        advice = "" if self._answered or self._settings.context else NEEDED
        return ConnectionLost(f"connection to {self._settings.url} lost after sending ({reason}){advice}")


def _model(name: str) -> str:
    return f"/v2/models/{quote(name, safe='')}"


def expect_ok(status: int, body: bytes, url: str) -> None:
    """Raises the error of an answer that is one."""
    if status == 200:
        return
    try:
        message = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):  # a proxy's page, not Triton's JSON
        message = body[:200].decode(errors="replace").strip() or "no message"
    raise refusal(f"{message} (HTTP {status} from {url})", str(status))
