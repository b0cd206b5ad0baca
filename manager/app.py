"""The manager's HTTP: who sends a request, the way to its endpoint, refusals, and the gateway for all other paths."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from hplm.errors import HplmError, InvalidInput, NoTenant, logged_error
from hplm_openai.app import CLIENT_HAS_GONE, HEALTH, Gateway
from hplm_openai.connections import Entrance, Gone, read_body
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import Given, key_in, shown
from manager import operators, owners
from manager.rights import MANAGE, Caller
from manager.site import HEADERS, Act, Asked, Endpoint, Site, allowed

LARGEST_BODY, AT_ONCE = 2_000_000, 256
ACTS_FOR = "openai-organization"  # the header in which an operator names an owner
STATUSES: dict[type[HplmError], int] = {InvalidInput: 400, NoTenant: 404}
ENDPOINTS: list[Endpoint] = [*owners.ENDPOINTS, *operators.ENDPOINTS]


def application(site: Site, gateway: Gateway, more: Sequence[BaseRoute] = ()) -> ASGIApp:
    """Returns the whole app. `more`: further routes, such as a console's."""
    asking = gateway.inner()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with asking.router.lifespan_context(asking):
            site.running.start()
            yield
            await run_in_threadpool(site.running.stop)

    def route(method: str, path: str, role: str, answer: Callable[[Request, Caller], Awaitable[Response]]) -> Route:
        async def answered(request: Request) -> Response:
            return await answer(request, allowed(await _caller(site, request), role))

        return Route(path, answered, methods=[method])

    others = [route(method, path, MANAGE, partial(answer, site)) for method, path, answer in owners.OTHERS]
    acts = [route(method, path, role, partial(_acted, site, act)) for method, path, role, act in ENDPOINTS]
    handlers = dict.fromkeys((Refused, HplmError, HTTPException, Gone, Exception), _told)
    app = Starlette(routes=[*others, *acts, *more], exception_handlers=handlers, lifespan=lifespan)
    app.router.default = asking
    return Entrance(app, AT_ONCE, exempt=HEALTH)


async def _caller(site: Site, request: Request) -> Caller:
    """Returns who sends a request. Raises if nobody has their key."""
    address = request.client.host if request.client is not None else ""
    secret, owner = key_in(request.headers.getlist("authorization")), request.headers.get(ACTS_FOR)
    return await run_in_threadpool(site.rights.caller, secret, address, owner)


async def _acted(site: Site, act: Act, request: Request, caller: Caller) -> Response:
    given: Given = dict(request.query_params)
    if request.method == "POST":
        for name in given:
            raise wrong(f"the address has the parameter {shown(name)}: send fields in the body", name[:256])
        is_empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
        body: dict[str, Any] = {} if is_empty else await read_body(request, LARGEST_BODY)
        given = {name: one for name, one in body.items() if one is not None}
    return JSONResponse(await run_in_threadpool(act, site, Asked(caller, request.path_params, given)), headers=HEADERS)


async def _told(request: Request, error: Exception) -> Response:
    """Returns what a client gets for an error."""
    if isinstance(error, Gone):
        return Response(status_code=CLIENT_HAS_GONE)
    return refused(request, error).response(request.url.path)


def refused(request: Request, error: Exception) -> Refused:
    """Returns the refusal that an error is. Logs what is a fault of ours."""
    match error:
        case Refused():
            return error
        case HTTPException():
            allowed = (error.headers or {}).get("Allow", "another method")
            return Refused(error.status_code, f"{request.method} is not served here: send {allowed}", headers=error.headers)
        case _:
            known = logged_error(error, "the request")
            usual = {"UNAVAILABLE": 503, "INVALID_ARG": 400}.get(known.status, 500)
            status = next((status for kind, status in STATUSES.items() if isinstance(known, kind)), usual)
            return Refused(status, str(known), known.word)
