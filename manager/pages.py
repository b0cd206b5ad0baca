"""Shows the console's pages and does its forms: sessions, rights, files that a form brings, and errors as pages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from hplm.tenants.snapshot import QUOTAS
from hplm_openai.app import CLIENT_HAS_GONE
from hplm_openai.connections import Gone, read_bytes
from hplm_openai.errors import Refused, wrong
from manager.app import ENDPOINTS, refused
from manager.jobs import DATA_FILES
from manager.rendering import ROOT, page, to
from manager.rights import LIMITS, OPERATOR, SESSION_SECONDS, Caller
from manager.site import Act, Asked, Site, allowed
from manager.uploads import DATA, TRAINS

SESSION, ACTS_FOR = "hplm_session", "hplm_acts_for"  # cookies
OPERATE = "/operate"  # where operators begin
LARGEST_FORM = 100_000  # bytes, without files
ROLE_OF: dict[Act, str] = {act: role for *_, role, act in ENDPOINTS}  # which an endpoint needs
NUMBERS = {*QUOTAS, *LIMITS, "deadline_us", "days", "keep", "least", "minutes", "n_epochs", "version"}  # fields
Fields = dict[str, str]
Answer = Callable[[Request, Caller], Awaitable[Response]]


@dataclass
class Visit:
    """A request to the console, whose sender has signed in."""

    site: Site
    caller: Caller
    path: Fields  # what the path names
    fields: Fields  # of the query or of the form

    @property
    def owner(self) -> str:
        return self.caller.acting_for()

    def do(self, act: Act, path: Fields | None = None, /, **given: Any) -> Any:
        """Does what an endpoint of the API does, for those who may. `path`: what its path names, if not what ours does."""
        given = {name: one for name, one in given.items() if one is not None}
        return act(self.site, Asked(allowed(self.caller, ROLE_OF[act]), path or self.path, given))

    @property
    def values(self) -> dict[str, Any]:
        """The fields that are not empty, as endpoints take them."""
        filled = {name: text.strip() for name, text in self.fields.items() if text.strip()}
        return {name: _number(text) if name in NUMBERS else text for name, text in filled.items()}


@dataclass(frozen=True)
class Page:
    path: str
    needs: str | None  # the role of those who may see it; None: any, also of an operator who acts for no owner
    template: str
    facts: Callable[[Visit], dict[str, Any] | Response]  # what it shows; or another answer


@dataclass(frozen=True)
class Form:
    """A form that does what an endpoint of the API does."""

    path: str
    act: Act
    to: str | None  # the path to which it leads, with names of the path and of what was made; None: to its page
    files: Mapping[str, int] = field(default_factory=dict[str, int])  # how many its fields may have; they are kept before
    asked: Callable[[Visit, dict[str, Any]], dict[str, Any]] = lambda _, values: values  # as the endpoint takes it
    page: str = ""  # the path of its page, if that is another one
    elsewhere: str = ""  # where it leads an operator who acts for an owner, if it is for operators


class Pages:
    def __init__(self, site: Site, pages: Sequence[Page], forms: Sequence[Form]) -> None:
        self.site, self._forms = site, forms
        self._pages = {one.path: one for one in pages}

    def routes(self, *more: BaseRoute) -> list[BaseRoute]:
        return [
            Route("/", _to_root, methods=["GET"]),
            Mount(f"{ROOT}/static", StaticFiles(directory=Path(__file__).with_name("static"))),
            Route(f"{ROOT}/sign-in", self._answered(self._sign_in), methods=["POST"]),
            Route(f"{ROOT}/sign-in", _to_root, methods=["GET"]),
            self.route("POST", "/sign-out", self._sign_out), self.route("POST", "/act-as", self._act_as), *more,
            *(self.route("GET", one.path, partial(self._show, one)) for one in self._pages.values()),
            *(self.route("POST", one.path, partial(self._do, one)) for one in self._forms),
            Route(f"{ROOT}/{{rest:path}}", self._answered(self._nothing), methods=["GET", "POST"]),
        ]  # fmt: skip

    def route(self, method: str, path: str, answer: Answer) -> Route:
        """Returns a route for those who have signed in."""

        async def signed(request: Request) -> Response:
            if (cookie := request.cookies.get(SESSION)) is None:
                raise Refused(401, "")
            caller = await run_in_threadpool(self.site.rights.signed, cookie, request.cookies.get(ACTS_FOR))
            return await answer(request, caller)

        return Route(f"{ROOT}{path}", self._answered(signed), methods=[method])

    async def _show(self, shown: Page, request: Request, caller: Caller) -> Response:
        if shown.needs is not None:
            if shown.needs != OPERATOR and caller.owner is None:
                return to(OPERATE)
            allowed(caller, shown.needs)
        return await self._shown(shown, Visit(self.site, caller, request.path_params, dict(request.query_params)))

    async def _shown(self, shown: Page, visit: Visit, error: Refused | None = None, made: Any = None) -> Response:
        """Shows a page, after an error of its form with what was in the fields."""

        def show() -> Response:
            facts = shown.facts(visit)
            if isinstance(facts, Response):
                return facts
            after = {"fields": defaultdict(str, visit.fields), "error": error, "made": made}
            return page(shown.template, visit.caller, error.status if error else 200, **after, **facts)

        return await run_in_threadpool(show)

    async def _do(self, form: Form, request: Request, caller: Caller) -> Response:
        visit = Visit(self.site, allowed(caller, ROLE_OF[form.act]), request.path_params, {})

        def again(**after: Any) -> Awaitable[Response]:
            return self._shown(self._pages[form.page or form.path], visit, **after)

        try:
            if form.files:
                made = await self._begun(form, request, visit)
            else:
                visit.fields = await fields_of(request)
                made = await run_in_threadpool(_done, form, visit, {})
        except Exception as error:
            if isinstance(error, Gone) or not form.files:
                raise
            return await again(error=refused(request, error))
        if form.to is None:
            return await again(made=made)
        return to((form.elsewhere if caller.owner else "") or form.to.format(**{**made, **visit.path}))

    async def _begun(self, form: Form, request: Request, visit: Visit) -> Any:
        """Keeps a form's files, and does it. Returns what it has made."""
        own = replace(visit, caller=replace(visit.caller, owner=None)) if ROLE_OF[form.act] == OPERATOR else visit
        uploads, owner, who, ids = self.site.uploads, own.owner, own.caller.key, defaultdict[str, list[str]](list)
        try:
            async with uploads.form(request, owner, form.files) as (fields, files):
                own.fields = visit.fields = fields
                for name, came in files.items():
                    purpose = {"purpose": TRAINS if name in DATA_FILES else DATA}
                    for file in came:
                        if file.filename or file.size:  # else none was chosen
                            ids[name].append((await uploads.keep(file, purpose, owner, who)).id)
            return await run_in_threadpool(_done, form, own, ids)
        except Exception:
            for id in (id for found in ids.values() for id in found):  # nobody was told of them
                await run_in_threadpool(uploads.delete, owner, id, who)
            raise

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

    def _refusal(self, request: Request, error: Refused) -> Response:
        headers = {**(error.headers or {}), "hx-refresh": "true"}  # so that a page that swaps its part shows this one
        if error.status != 401:
            return page("error", None, error.status, headers, error=error.message)
        here = request.url.path if request.method == "GET" else ROOT
        return page("sign_in", None, 401, headers, error=error.message, here=here)

    async def _sign_in(self, request: Request) -> Response:
        fields = await fields_of(request)
        address = request.client.host if request.client is not None else ""
        try:
            caller = await run_in_threadpool(self.site.rights.caller, fields.get("key", "").strip(), address)
        except Refused as error:
            said = "this key is unknown, or not valid any more" if error.status == 401 else error.message
            return page("sign_in", None, error.status, error.headers, error=said, here=ROOT)
        here = fields.get("here", ROOT)
        answer = to(here.removeprefix(ROOT) if here.startswith(f"{ROOT}/") else "")
        _keep(request, answer, SESSION, self.site.rights.sign(caller))
        if ACTS_FOR in request.cookies:
            answer.delete_cookie(ACTS_FOR, ROOT)
        return answer

    async def _sign_out(self, request: Request, caller: Caller) -> Response:
        answer = to("")
        for cookie in {SESSION, ACTS_FOR} & request.cookies.keys():
            answer.delete_cookie(cookie, ROOT)
        return answer

    async def _act_as(self, request: Request, caller: Caller) -> Response:
        """Lets an operator see an owner's pages from now on; without an owner: no more."""
        allowed(caller, OPERATOR)
        if not (owner := (await fields_of(request)).get("owner", "")):
            (answer := to(OPERATE)).delete_cookie(ACTS_FOR, ROOT)
            return answer
        await run_in_threadpool(self.site.rights.signed, request.cookies[SESSION], owner)  # raises if there is no such owner
        _keep(request, answer := to(""), ACTS_FOR, owner)
        return answer

    async def _nothing(self, request: Request) -> Response:
        raise Refused(404, "there is no such page")


def _done(form: Form, visit: Visit, ids: Mapping[str, list[str]]) -> Any:
    files = {name: found if form.files[name] > 1 else found[0] for name, found in ids.items()}
    return visit.do(form.act, **form.asked(visit, {**visit.values, **files}))


async def fields_of(request: Request) -> Fields:
    body = await read_bytes(request, LARGEST_FORM)
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=32))
    except ValueError:
        raise wrong("this is no form in UTF-8: use the page's own") from None


def _number(text: str) -> int | float | str:
    """Returns a field's number; its text if it is none, which is then refused by what takes it."""
    if not re.fullmatch(r"-?\d{1,16}(\.\d{1,16})?", text, re.ASCII):
        return text
    return float(text) if "." in text else int(text)


def _keep(request: Request, answer: Response, cookie: str, value: str) -> None:
    """Sets a cookie, for as long as a session."""
    secure = request.headers.get("origin", "").startswith("https:")  # a proxy may have ended the TLS
    answer.set_cookie(cookie, value, SESSION_SECONDS, path=ROOT, secure=secure, httponly=True, samesite="strict")


def _check_origin(request: Request) -> None:
    """Refuses a form of another site's page."""
    origin = request.headers.get("origin", "")
    if not origin or urlsplit(origin).netloc != request.headers.get("host"):
        raise Refused(403, "this form came from a page of another site: open the console by its own address")


async def _to_root(_: Request) -> Response:
    return to("")
