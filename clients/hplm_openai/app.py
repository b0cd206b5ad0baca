"""The gateway's endpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from hplm_client.errors import HplmClientError
from hplm_client.generation import Outputs, only
from hplm_client.wire import Value
from hplm_openai.answers import AnswerWriter, ChatWriter, CompletionWriter, model_of
from hplm_openai.completion_request import CompletionRequest
from hplm_openai.connections import AtOnce, Events, Gone, Named, Numbered, read_body, together, while_connected
from hplm_openai.decoders import Decoders
from hplm_openai.errors import Refused, refusal
from hplm_openai.requests import check_model, key_in, read_chat, read_completion

CLIENT_HAS_GONE = 499  # nobody reads it
HEALTH = "/health"
ARRIVED = "hplm-arrived"  # by it a front door says when a request arrived


@dataclass(frozen=True)
class RequestLimits:
    largest_body: int = 1_000_000  # bytes
    at_once: int = 1024  # requests on their way
    usual_tokens: int = 256  # of a chat's answer, where the request does not say


class Gateway:
    def __init__(self, connect: Callable[[], Decoders], limits: RequestLimits) -> None:
        """`connect` is called in the event loop that serves."""
        self._connect = connect
        self._limits = limits

    def app(self) -> ASGIApp:
        app = Starlette(
            routes=[
                Route(HEALTH, self._health, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            middleware=[Middleware(AtOnce, most=self._limits.at_once, exempt=HEALTH)],
            exception_handlers=dict.fromkeys((Refused, HplmClientError, HTTPException, Gone, Exception), _told),
            lifespan=self._lifespan,
        )
        return Named(app)  # around Starlette's own answers too

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._decoders = self._connect()
        yield
        await self._decoders.close()

    async def _health(self, _: Request) -> Response:
        if not await self._decoders.ready():
            raise Refused(503, "the server is not ready, or cannot be reached")
        return JSONResponse({"status": "ready"})

    async def _models(self, request: Request) -> Response:
        opened = await while_connected(request.receive, self._decoders.opened(_key_of(request)))
        return JSONResponse({"object": "list", "data": list(map(model_of, opened))})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        check_model(name)
        return JSONResponse(model_of(await while_connected(request.receive, self._decoders.find(name, _key_of(request)))))

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion, CompletionWriter)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, partial(read_chat, usual_tokens=self._limits.usual_tokens), ChatWriter)

    async def _answer(
        self, request: Request, read: Callable[..., list[CompletionRequest]], kind: type[AnswerWriter]
    ) -> Response:
        key = _key_of(request)
        several = read(await read_body(request, self._limits.largest_body), key)
        more: dict[str, Value] = {}
        if arrived := request.headers.getlist(ARRIVED):  # passed on, so that the server counts its times from then
            more[ARRIVED] = ", ".join(arrived)
        several = [replace(asked, id=request.state.id, more={**asked.more, **more}) for asked in several]
        answer = kind(several[0])
        responses = together([self._decoders.ask(asked) for asked in several])
        try:
            if not answer.request.stream:
                return JSONResponse(answer.whole(await while_connected(request.receive, _whole(responses, len(several)))))
            # The first response is awaited here, so that an error before it has a status of its own.
            first = await while_connected(request.receive, anext(responses))
        except HplmClientError as error:
            raise refusal(error, answer.request) from error
        return Events(answer, first, responses)


async def _whole(responses: AsyncGenerator[Numbered], count: int) -> list[Outputs]:
    """Returns the only response for each prompt, in order."""
    found: list[list[Outputs]] = [[] for _ in range(count)]
    async with aclosing(responses):
        async for number, response in responses:
            found[number].append(response)
    return [only(one) for one in found]


def _key_of(request: Request) -> str | None:
    return key_in(request.headers.getlist("authorization"))


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
            served = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/NAME, GET /health"
            refused = Refused(error.status_code, f"no such endpoint: {served} are served here", headers=error.headers)
        case _:
            refused = Refused(500, "the gateway failed: its log says where", "internal")
    return JSONResponse(refused.body, refused.status, refused.headers)
