"""The pages of the console share this: sessions, forms, templates, and errors as pages."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from hplm_openai.app import CLIENT_HAS_GONE
from hplm_openai.connections import Gone, read_bytes
from hplm_openai.errors import Refused, wrong
from manager.app import ENDPOINTS, refused
from manager.jobs import DATA_FILES
from manager.rights import ASK, MANAGE, OPERATOR, SESSION_SECONDS, Caller
from manager.site import ALLOWED, HEADERS, Act, Asked, Site, allowed
from manager.uploads import DATA, TRAINS

ROOT, SESSION, ACTS_FOR = "/console", "hplm_session", "hplm_acts_for"  # the last two are cookies
OPERATE = f"{ROOT}/operate"  # where operators begin
LARGEST_FORM = 100_000  # bytes, without files
SECURE = {
    **HEADERS, "referrer-policy": "same-origin",  # with none, browsers send no Origin
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
}  # fmt: skip
ROLE_OF: dict[Act, str] = {act: role for *_, role, act in ENDPOINTS}  # which an endpoint needs
EMPTY = (None, "", {})  # what is not sent
Fields = dict[str, str]
Ids = Mapping[str, list[str]]  # of files, by their fields
Wanted = Callable[[Fields, Ids], dict[str, Any]]
Show = Callable[[Request, Caller], Awaitable[Response]]


class Pages:
    def __init__(self, site: Site, **shared: Any) -> None:
        """`shared`: what all templates may use."""
        self.site = site
        pages = Environment(
            loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        pages.globals |= {"root": ROOT, **shared}
        pages.filters |= {"when": _when}
        self.template = pages.get_template

    def routes(self, *shown: BaseRoute) -> list[BaseRoute]:
        """Returns these routes, and those that every console has."""
        return [
            Route("/", _to(ROOT), methods=["GET"]),
            Mount(f"{ROOT}/static", StaticFiles(directory=Path(__file__).with_name("static"))),
            Route(f"{ROOT}/sign-in", self._answered(self._sign_in), methods=["POST"]),
            Route(f"{ROOT}/sign-in", _to(ROOT), methods=["GET"]),
            self.post("/sign-out", self._sign_out, None), self.post("/act-as", self._act_as, OPERATOR), *shown,
            Route(f"{ROOT}/{{rest:path}}", self._answered(self._nothing), methods=["GET", "POST"]),
        ]  # fmt: skip

    def get(self, path: str, show: Show, needs: str | None = ASK) -> Route:
        """Returns the route of a page for those who have signed in. `needs`: their role; None: any."""
        return Route(f"{ROOT}{path}", self._answered(partial(self._signed, show, needs)), methods=["GET"])

    def post(self, path: str, do: Show, needs: str | None = ASK) -> Route:
        return Route(f"{ROOT}{path}", self._answered(partial(self._signed, do, needs)), methods=["POST"])

    def page(
        self, name: str, caller: Caller | None, status: int = 200, headers: Mapping[str, str] | None = None, **shown: Any
    ) -> Response:
        role = caller.role if caller is not None else None
        rights = {"manages": role in ALLOWED[MANAGE], "operates": role == OPERATOR}
        text = self.template(f"{name}.html").render(page=name, me=caller, **rights, **shown)
        return HTMLResponse(text, status, {**SECURE, **(headers or {})})

    async def do(self, caller: Caller, act: Act, path: Fields | None = None, /, **given: Any) -> Any:
        """Does what an endpoint of the API does, for those who may."""
        asked = Asked(allowed(caller, ROLE_OF[act]), path or {}, {name: one for name, one in given.items() if one not in EMPTY})
        return await run_in_threadpool(act, self.site, asked)

    async def begin(
        self,
        request: Request,
        caller: Caller,
        names: Mapping[str, int],
        act: Act,
        wanted: Callable[[Fields, Ids], dict[str, Any]],
    ) -> tuple[Any, Fields]:
        """Keeps the files of a form, and begins the job that it is about. Returns the job, or why not, and the form's fields.

        `names`: how many files each field may have. `wanted`: what to send to `act`.
        """
        uploads, owner, fields, ids = self.site.uploads, caller.acting_for(), Fields(), defaultdict[str, list[str]](list)
        try:
            async with uploads.form(request, owner, names) as (fields, files):
                for name, came in files.items():
                    purpose = {"purpose": TRAINS if name in DATA_FILES else DATA}
                    for file in came:
                        if file.filename or file.size:  # else none was chosen
                            ids[name].append((await uploads.keep(file, purpose, owner, caller.key)).id)
            return await self.do(caller, act, **wanted(fields, ids)), fields
        except Exception as error:
            for id in (id for own in ids.values() for id in own):  # nobody was told of them
                await run_in_threadpool(uploads.delete, owner, id, caller.key)
            if isinstance(error, Gone):
                raise
            return refused(request, error), fields

    def doing(self, act: Act, back: str) -> Show:
        """Returns what does as a form with numbers alone says about the thing of its path, and goes back to a page."""

        async def done(request: Request, caller: Caller) -> Response:
            fields = await fields_of(request)
            await self.do(caller, act, path := request.path_params, **{name: number(fields, name) for name in fields})
            return to(back.format(**path))

        return done

    def _answered(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Returns an endpoint whose errors are pages, and that takes forms of its own pages alone."""

        async def answered(request: Request) -> Response:
            try:
                if request.method == "POST":
                    _check_origin(request)
                return await answer(request)
            except Gone:
                return Response(status_code=CLIENT_HAS_GONE)
            except Exception as error:
                return self._refusal(request, refused(request, error))

        return answered

    async def _signed(self, show: Show, needs: str | None, request: Request) -> Response:
        if (cookie := request.cookies.get(SESSION)) is None:
            raise Refused(401, "")
        caller = await run_in_threadpool(self.site.rights.signed, cookie, request.cookies.get(ACTS_FOR))
        if needs is not None:
            if needs != OPERATOR and caller.owner is None:
                return to(OPERATE)
            allowed(caller, needs)
        return await show(request, caller)

    def _refusal(self, request: Request, error: Refused) -> Response:
        headers = {**(error.headers or {}), "hx-refresh": "true"}  # so that a page that swaps its part shows this one
        if error.status != 401:
            return self.page("error", None, error.status, headers, error=error.message)
        here = request.url.path if request.method == "GET" else ROOT
        return self.page("sign_in", None, 401, headers, error=error.message, here=here)

    async def _sign_in(self, request: Request) -> Response:
        fields = await fields_of(request)
        address = request.client.host if request.client is not None else ""
        try:
            caller = await run_in_threadpool(self.site.rights.caller, fields.get("key", "").strip(), address)
        except Refused as error:
            said = "this key is unknown, or not valid any more" if error.status == 401 else error.message
            return self.page("sign_in", None, error.status, error.headers, error=said, here=ROOT)
        here = fields.get("here", ROOT)
        answer = to(here if here.startswith(f"{ROOT}/") else ROOT)
        _keep(request, answer, SESSION, self.site.rights.sign(caller))
        if ACTS_FOR in request.cookies:
            answer.delete_cookie(ACTS_FOR, ROOT)
        return answer

    async def _sign_out(self, request: Request, caller: Caller) -> Response:
        answer = to(ROOT)
        for cookie in {SESSION, ACTS_FOR} & request.cookies.keys():
            answer.delete_cookie(cookie, ROOT)
        return answer

    async def _act_as(self, request: Request, caller: Caller) -> Response:
        """Lets an operator see an owner's pages from now on; without an owner: no more."""
        if not (owner := (await fields_of(request)).get("owner", "")):
            (answer := to(OPERATE)).delete_cookie(ACTS_FOR, ROOT)
            return answer
        await run_in_threadpool(self.site.rights.signed, request.cookies[SESSION], owner)  # raises if there is no such owner
        _keep(request, answer := to(ROOT), ACTS_FOR, owner)
        return answer

    async def _nothing(self, request: Request) -> Response:
        raise Refused(404, "there is no such page")


def to(path: str) -> RedirectResponse:
    return RedirectResponse(path, 303, SECURE)


async def fields_of(request: Request) -> Fields:
    body = await read_bytes(request, LARGEST_FORM)
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=32))
    except ValueError:
        raise wrong("this is no form in UTF-8: use the page's own") from None


def number(fields: Mapping[str, str], name: str) -> int | float | str | None:
    """Returns a field's number; its text if it is none, which is then refused by what takes it; None: it is empty."""
    value = fields.get(name, "").strip()
    if not re.fullmatch(r"-?\d{1,16}(\.\d{1,16})?", value, re.ASCII):
        return value or None
    return float(value) if "." in value else int(value)


def _keep(request: Request, answer: Response, cookie: str, value: str) -> None:
    """Sets a cookie, for as long as a session."""
    secure = request.headers.get("origin", "").startswith("https:")  # a proxy may have ended the TLS
    answer.set_cookie(cookie, value, SESSION_SECONDS, path=ROOT, secure=secure, httponly=True, samesite="strict")


def _check_origin(request: Request) -> None:
    """Refuses a form of another site's page."""
    origin = request.headers.get("origin", "")
    if not origin or urlsplit(origin).netloc != request.headers.get("host"):
        raise Refused(403, "this form came from a page of another site: open the console by its own address")


def _when(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else ""


def _to(path: str) -> Callable[[Request], Awaitable[Response]]:
    async def answered(_: Request) -> Response:
        return to(path)

    return answered
