"""The gateway's endpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from hplm_client.errors import HplmClientError
from hplm_client.generation import Outputs, only
from hplm_client.settings import TENANT_HEADER
from hplm_openai.answers import model_of
from hplm_openai.backbones import Backbones
from hplm_openai.completion_request import CompletionRequest
from hplm_openai.connections import Entrance, Events, Gone, Numbered, in_json, read_body, together, while_connected
from hplm_openai.endpoints import CHATS, ENDPOINTS, OF_TENANT, Endpoint, Writing
from hplm_openai.errors import Refused, refusal, wrong
from hplm_openai.fields import check_model, key_in, shown

UNNAMED = "dummy"  # huggingface_hub's model, where the address names it
CLIENT_HAS_GONE = 499  # nobody reads it
HEALTH = "/health"
ARRIVED = "hplm-arrived"  # by it a front door says when a request arrived, so that the server counts its times from then


@dataclass(frozen=True)
class RequestLimits:
    largest_body: int = 2_000_000  # bytes
    at_once: int = 1024  # requests on their way
    usual_tokens: int = 256  # of a chat's answer, where the request does not say


class Gateway:
    def __init__(self, connect: Callable[[], Backbones], limits: RequestLimits) -> None:
        """`connect` is called in the event loop that serves."""
        self._connect = connect
        self._limits = limits

    def app(self) -> ASGIApp:
        return Entrance(self.inner(), self._limits.at_once, exempt=HEALTH)  # before Starlette's own answers too

    def inner(self) -> Starlette:
        """Returns the app without its entrance, for one that has its own."""
        answers = {path: partial(self._write, writing=one) for path, one in CHATS.items()}
        answers |= {path: partial(self._encode, endpoint=one) for path, one in ENDPOINTS.items()}
        return Starlette(
            routes=[
                Route(HEALTH, self._health, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                *(
                    Route(path, answer, methods=["POST"])
                    for own, answer in answers.items()
                    for path in dict.fromkeys((own, OF_TENANT + own.removeprefix(OF_TENANT)))
                ),
            ],
            exception_handlers=dict.fromkeys((Refused, HplmClientError, HTTPException, Gone, Exception), _told),
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._backbones = self._connect()
        yield
        await self._backbones.close()

    async def _health(self, _: Request) -> Response:
        if not await self._backbones.ready():
            raise Refused(503, "the server is not ready, or cannot be reached")
        return JSONResponse({"status": "ready"})

    async def _models(self, request: Request) -> Response:
        opened = await while_connected(request.receive, self._backbones.opened(_key_of(request)))
        return JSONResponse({"object": "list", "data": list(map(model_of, opened))})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        check_model(name)
        return JSONResponse(model_of(await while_connected(request.receive, self._backbones.find(name, _key_of(request)))))

    async def _write(self, request: Request, writing: Writing) -> Response:
        body, own = await self._read(request)
        several = [replace(asked, **own) for asked in writing.read(body, self._limits.usual_tokens)]
        answer = writing.writer(several[0])
        responses = together([self._backbones.ask(asked) for asked in several])
        try:
            if not answer.request.stream:
                return await in_json(answer.whole(await while_connected(request.receive, _whole(responses, len(several)))))
            # The first response is awaited here, so that an error before it has a status of its own.
            first = await while_connected(request.receive, anext(responses))
        except HplmClientError as error:
            raise refusal(error, answer.request) from error
        return Events(answer, first, responses)

    async def _encode(self, request: Request, endpoint: Endpoint) -> Response:
        body, own = await self._read(request)
        return await in_json(await while_connected(request.receive, self._backbones.infer(endpoint, body, **own)))

    async def _read(self, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the body of a request, and what else it says: whom it asks, with which key, id, and time of arrival."""
        key, body = _key_of(request), await read_body(request, self._limits.largest_body)
        arrived = request.headers.getlist(ARRIVED)
        more = {ARRIVED: ", ".join(arrived)} if arrived else {}
        return body, {"tenant": _model_of(request, body), "key": key, "id": request.state.id, "more": more}


async def _whole(responses: AsyncGenerator[Numbered], count: int) -> list[Outputs]:
    """Returns the only response for each prompt, in order."""
    found: list[list[Outputs]] = [[] for _ in range(count)]
    async with aclosing(responses):
        async for number, response in responses:
            found[number].append(response)
    return [only(one) for one in found]


def _key_of(request: Request) -> str | None:
    return key_in(request.headers.getlist("authorization"))


def _model_of(request: Request, body: Mapping[str, Any]) -> str:
    """Returns the tenant that a request names by its path, its header, or as others do by the field `model`."""
    named = [*request.path_params.values(), *request.headers.getlist(TENANT_HEADER)]
    field = body.get("model")
    if not named or field not in (None, UNNAMED):
        check_model(field, f", by 'model' or the header {TENANT_HEADER}")
        named.append(field)
    if len(set(named)) > 1:
        raise wrong(f"the request names several models ({', '.join(map(shown, named))}): name one", "model")
    return named[0]


async def _told(request: Request, error: Exception) -> Response:
    """Returns what a client gets for an error."""
    match error:
        case Gone():
            return Response(status_code=CLIENT_HAS_GONE)
        case Refused():
            refused = error
        case HplmClientError():
            refused = refusal(error, CompletionRequest(key=_key_of(request), id=request.state.id))
        case HTTPException():
            served = ", ".join([*(f"POST {path}" for path in (*CHATS, *ENDPOINTS)), "GET /v1/models", "GET /health"])
            refused = Refused(error.status_code, f"no such endpoint: {served} are served here", headers=error.headers)
        case _:
            refused = Refused(500, "the gateway failed: its log says where", "internal")
    return refused.response(request.url.path)
