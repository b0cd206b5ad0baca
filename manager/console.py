"""The owners' console: pages that show what the API tells, and forms that do what it does. They work without JavaScript."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from hplm_openai.app import CLIENT_HAS_GONE, Gateway
from hplm_openai.connections import Gone, read_bytes
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import shown
from manager import owners
from manager.app import ENDPOINTS, refused
from manager.jobs import told_event
from manager.operators import told_owner
from manager.records import WAITING
from manager.rights import MANAGE, ROLES, SESSION_SECONDS, Caller
from manager.site import ALLOWED, HEADERS, Act, Asked, Site, allowed
from manager.uploads import FILE, TRAINS, Form

ROOT, COOKIE = "/console", "hplm_session"
LARGEST_FORM = 100_000  # bytes, without files
DATA = ("training_file", "validation_file")
ASKS = ("classify", "multilabel", "tag", "generate")  # tasks of which the page for trying shows answers
MOST_SAID, MOST_TOKENS = 5, 200  # of an answer: labels, tokens
MOST_JOBS, MOST_EVENTS, MOST_KEYS = "20", 100, "200"
WIDTH, HEIGHT, EDGE = 600, 160, 8  # of a curve
SECURE = {
    **HEADERS, "referrer-policy": "same-origin",  # with none, browsers send no Origin
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
}  # fmt: skip
ROLE_OF: dict[Act, str] = {act: role for *_, role, act in ENDPOINTS}  # which an endpoint needs
Fields = dict[str, str]
Show = Callable[[Request, Caller], Awaitable[Response]]


class Console:
    def __init__(self, site: Site, gateway: Gateway) -> None:
        self._site, self._asking = site, gateway.inner()
        pages = Environment(
            loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        pages.globals |= {"root": ROOT, "curve": _curve}
        pages.filters |= {"when": _when}
        self._template = pages.get_template

    def routes(self) -> list[BaseRoute]:
        model = f"{ROOT}/models/{{id:path}}"
        shown: list[tuple[str, Show]] = [
            (ROOT, self._models), (f"{ROOT}/new", self._new), (f"{ROOT}/jobs/{{id}}", self._job),
            (f"{ROOT}/keys", self._keys), (model, self._model), (f"{ROOT}/try/{{id:path}}", self._try),
        ]  # fmt: skip
        job, key = f"{ROOT}/jobs/{{id}}", f"{ROOT}/keys/{{id}}"
        done: list[tuple[str, Show]] = [
            (f"{ROOT}/new", self._create), (f"{job}/cancel", partial(self._act, owners.cancel_job, job)),
            (f"{ROOT}/keys", self._add_key), (f"{key}/revoke", partial(self._act, owners.revoke_key, f"{ROOT}/keys")),
            (f"{model}/promote", partial(self._act, owners.promote, f"{ROOT}/models/{{id}}")),
            (f"{model}/rollback", partial(self._act, owners.roll_back, f"{ROOT}/models/{{id}}")),
            (f"{model}/delete", self._delete), (f"{ROOT}/try/{{id:path}}", self._try), (f"{ROOT}/sign-out", self._sign_out),
        ]  # fmt: skip
        return [
            Route("/", _to(ROOT), methods=["GET"]),
            Mount(f"{ROOT}/static", StaticFiles(directory=Path(__file__).with_name("static"))),
            Route(f"{ROOT}/sign-in", self._answered(self._sign_in), methods=["POST"]),
            Route(f"{ROOT}/sign-in", _to(ROOT), methods=["GET"]),
            *(Route(path, self._answered(partial(self._signed, do)), methods=["POST"]) for path, do in done),
            *(Route(path, self._answered(partial(self._signed, show)), methods=["GET"]) for path, show in shown),
            Route(f"{ROOT}/{{rest:path}}", self._answered(self._nothing), methods=["GET", "POST"]),
        ]

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

    async def _signed(self, show: Show, request: Request) -> Response:
        return await show(request, await self._caller(request))

    async def _caller(self, request: Request) -> Caller:
        if (cookie := request.cookies.get(COOKIE)) is None:
            raise Refused(401, "")
        return await run_in_threadpool(self._site.rights.signed, cookie)

    def _refusal(self, request: Request, error: Refused) -> Response:
        headers = {**(error.headers or {}), "hx-refresh": "true"}  # so that a page that swaps its part shows this one
        if error.status != 401:
            return self._page("error", None, error.status, headers, error=error.message)
        here = request.url.path if request.method == "GET" else ROOT
        return self._page("sign_in", None, 401, headers, error=error.message, here=here)

    def _page(
        self, name: str, caller: Caller | None, status: int = 200, headers: Mapping[str, str] | None = None, **shown: Any
    ) -> Response:
        manages = caller is not None and caller.role in ALLOWED[MANAGE]
        text = self._template(f"{name}.html").render(page=name, me=caller, manages=manages, **shown)
        return HTMLResponse(text, status, {**SECURE, **(headers or {})})

    async def _do(self, caller: Caller, act: Act, path: Fields | None = None, /, **given: Any) -> Any:
        """Does what an endpoint of the API does, for those who may."""
        asked = Asked(allowed(caller, ROLE_OF[act]), path or {}, {name: one for name, one in given.items() if one})
        return await run_in_threadpool(act, self._site, asked)

    async def _sign_in(self, request: Request) -> Response:
        fields = await _fields(request)
        address = request.client.host if request.client is not None else ""
        try:
            caller = await run_in_threadpool(self._site.rights.caller, fields.get("key", "").strip(), address)
            if caller.owner is None:
                raise Refused(403, "this is a key of operators: paste a key of an owner")
        except Refused as error:
            said = "this key is unknown, or not valid any more" if error.status == 401 else error.message
            return self._page("sign_in", None, error.status, error.headers, error=said, here=ROOT)
        here = fields.get("here", ROOT)
        answer = _back(here if here.startswith(f"{ROOT}/") else ROOT)
        secure = request.headers.get("origin", "").startswith("https:")  # a proxy may have ended the TLS
        signed, rules = self._site.rights.sign(caller), {"path": ROOT, "httponly": True, "samesite": "strict"}
        answer.set_cookie(COOKIE, signed, SESSION_SECONDS, secure=secure, **rules)
        return answer

    async def _sign_out(self, request: Request, caller: Caller) -> Response:
        answer = _back(ROOT)
        answer.delete_cookie(COOKIE, ROOT)
        return answer

    async def _nothing(self, request: Request) -> Response:
        raise Refused(404, "there is no such page")

    async def _models(self, request: Request, caller: Caller) -> Response:
        bases, own = await self._both(caller)
        manages = caller.role in ALLOWED[MANAGE]
        jobs = (await self._do(caller, owners.list_jobs, limit=MOST_JOBS))["data"] if manages else []
        return self._page("models", caller, bases=bases, own=own, jobs=jobs, waiting=WAITING)

    async def _both(self, caller: Caller) -> tuple[list[Any], list[Any]]:
        """Returns the models that everybody has, and those of an owner."""
        found = (await self._do(caller, owners.list_models))["data"]
        own = [model for model in found if model["owned_by"] == caller.owner]
        return [model for model in found if model not in own], own

    async def _new(
        self, request: Request, caller: Caller, fields: Fields | None = None, error: Refused | None = None
    ) -> Response:
        allowed(caller, ROLE_OF[owners.create_job])
        bases, own = await self._both(caller)
        fields = defaultdict(str, fields if fields is not None else request.query_params)
        model = next((model for model in own if model["id"] == fields["model"]), None)
        status = error.status if error is not None else 200
        return self._page("new", caller, status, bases=bases, model=model, fields=fields, error=error)

    async def _create(self, request: Request, caller: Caller) -> Response:
        site, fields, kept = self._site, dict[str, str](), dict[str, str]()
        allowed(caller, ROLE_OF[owners.create_job])
        owner = caller.acting_for()
        try:
            form = await site.uploads.read(request, owner, DATA)
            fields = given = dict(form.fields)
            try:
                for name, file in list(form.files.items()):
                    if file.name or file.bytes:  # else a browser says that none was chosen
                        one = Form({"purpose": TRAINS}, {FILE: form.files.pop(name)})
                        kept[name] = (await site.uploads.keep(one, owner, caller.key)).id
            finally:
                form.drop()
            ours = {name: value for name in ("task", "promote") if (value := given.get(name))}
            ours |= {name: True for name in ("best", "new_labels", "fresh") if given.get(name)}
            job = await self._do(
                caller, owners.create_job, model=given.get("model"), suffix=given.get("suffix", "").strip(), hplm=ours,
                hyperparameters={"n_epochs": _number(given, "n_epochs")}, **kept,
            )  # fmt: skip
        except Exception as error:
            for id in kept.values():  # nobody was told of them
                await run_in_threadpool(site.uploads.delete, owner, id, caller.key)
            if isinstance(error, Gone):
                raise
            return await self._new(request, caller, fields, refused(request, error))
        return _back(f"{ROOT}/jobs/{job['id']}")

    async def _job(self, request: Request, caller: Caller) -> Response:
        job = await self._do(caller, owners.job, request.path_params)
        events = [told_event(event) for event in await run_in_threadpool(self._site.records.events, job["id"])]
        exams = [event["data"] for event in events if event["type"] == "metrics"]
        files = {name: await self._name(caller, job[name]) if job[name] else None for name in DATA}
        runs = job["status"] in WAITING
        facts = {"job": job, "exams": exams, "events": events[: -MOST_EVENTS - 1 : -1], "runs": runs, "files": files}
        live = self._template("live.html").render(**facts)
        seen = hashlib.sha256(live.encode()).hexdigest()[:16]
        if request.query_params.get("seen") == seen:
            return Response(status_code=204, headers=HEADERS)
        return self._page("job", caller, **facts, live=Markup(live), seen=seen)

    async def _name(self, caller: Caller, id: str) -> str:
        with suppress(Refused):
            return (await self._do(caller, owners.file, {"id": id}))["filename"]
        return "deleted"

    async def _act(self, act: Act, back: str, request: Request, caller: Caller) -> Response:
        """Does what a form with numbers alone says about the thing of this path, and goes back to a page."""
        fields = await _fields(request)
        await self._do(caller, act, path := request.path_params, **{name: _number(fields, name) for name in fields})
        return _back(back.format(**path))

    async def _model(self, request: Request, caller: Caller) -> Response:
        model = await self._do(caller, owners.model, request.path_params)
        if caller.owner is None or model["owned_by"] != caller.owner:
            return _back(f"{ROOT}/new?model={model['id']}")
        found = await run_in_threadpool(self._site.models.find, caller.acting_for(), model["id"])
        versions = model["hplm"]["versions"]
        number = request.query_params.get("version", str(found.stored))
        if number not in [str(one["version"]) for one in versions]:
            number = str(found.stored)
        report = await run_in_threadpool(found.report, int(number))
        return self._page(
            "model", caller, model=model, versions=versions, number=int(number), report=report,
            confused=_confused(report.get("confusion", {})), asks=ASKS,
        )  # fmt: skip

    async def _delete(self, request: Request, caller: Caller) -> Response:
        name, id = (await _fields(request)).get("name", "").strip(), request.path_params["id"]
        if name != id:
            raise wrong(f"you wrote {shown(name)}, so nothing was deleted: write the model's whole name, {id}")
        await self._do(caller, owners.delete_model, request.path_params)
        return _back(ROOT)

    async def _keys(self, request: Request, caller: Caller, made: Any = None) -> Response:
        keys = (await self._do(caller, owners.keys, limit=MOST_KEYS))["data"]
        own = await run_in_threadpool(told_owner, self._site, caller.acting_for())
        return self._page("keys", caller, keys=keys, own=own, made=made, roles=ROLES[:2], now=time.time())

    async def _add_key(self, request: Request, caller: Caller) -> Response:
        fields = await _fields(request)
        made = await self._do(caller, owners.add_key, role=fields.get("role"), days=_number(fields, "days"))
        return await self._keys(request, caller, made)

    async def _try(self, request: Request, caller: Caller) -> Response:
        model = await self._do(caller, owners.model, request.path_params)
        _, own = await self._both(caller)
        others = [one for one in own if one["id"] != model["id"] and one["hplm"]["task"] in ASKS]
        mine = [one for one in others if one["hplm"]["candidate_of"] == model["id"]]  # versions that wait come first
        fields = await _fields(request) if request.method == "POST" else {"beside": mine[0]["id"]} if mine else {}
        asked = [model, *(one for one in others if one["id"] == fields.get("beside"))]
        text, answers = fields.get("text", ""), []
        if text.strip():
            answers = await asyncio.gather(*(self._ask(request, one, text) for one in asked))
        others.sort(key=lambda one: one not in mine)
        return self._page("try", caller, model=model, others=others, fields=fields, text=text, answers=answers, asks=ASKS)

    async def _ask(self, request: Request, model: Any, text: str) -> dict[str, Any]:
        """Asks the gateway with the manager's own key."""
        id, task = model["id"], model["hplm"]["task"]
        path, body = {
            "tag": (f"/models/{id}", {"inputs": text}),
            "generate": ("/v1/completions", {"model": id, "prompt": text, "max_tokens": MOST_TOKENS}),
        }.get(task, ("/v1/classifications", {"model": id, "input": [text]}))
        begun, sent, status, came = time.monotonic(), [json.dumps(body).encode()], 0, bytearray()

        async def receive() -> Any:
            return {"type": "http.request", "body": sent.pop()} if sent else await request.receive()

        async def send(part: Any) -> None:
            nonlocal status
            status = part.get("status", status)
            came.extend(part.get("body", b""))

        headers = [(b"authorization", f"Bearer {self._site.rights.secret}".encode())]
        scope = {**request.scope, "method": "POST", "path": path, "query_string": b"", "headers": headers, "path_params": {}}
        await self._asking(scope, receive, send)
        found = json.loads(came) if came else {}
        said = _said(task, id, found) if status == 200 else []
        error = None if status == 200 else (found["error"]["message"] if "error" in found else found.get("message"))
        return {"model": model, "ms": 1000 * (time.monotonic() - begun), "said": said, "error": error}


def _said(task: str, id: str, answer: Any) -> list[tuple[str, float | None]]:
    """Returns what a model has answered, the likeliest first."""
    if task == "generate":
        return [(answer["choices"][0]["text"], None)]
    if task == "tag":
        return [(f"{one['word']}: {one['entity_group']}", one["score"]) for one in answer]
    scores = answer["results"][0][id]["scores"]
    return sorted(scores.items(), key=lambda one: -one[1])[:MOST_SAID]


def _confused(confusion: Mapping[str, Mapping[str, int]]) -> dict[str, list[tuple[str, int]]]:
    """Returns the wrong answers to each label, the most frequent first."""
    wrong = {
        right: sorted(((one, count) for one, count in answers.items() if one != right), key=lambda one: -one[1])
        for right, answers in confusion.items()
    }
    return {right: answers for right, answers in wrong.items() if answers}


def _curve(exams: Sequence[Mapping[str, float]], name: str, among: Sequence[str]) -> str:
    """Returns the points of a line through the values of this name. The scale fits all names of `among`."""
    values = [exam[one] for exam in exams for one in among]
    low, high, last = min(values), max(values), max(exam["step"] for exam in exams)
    low, high = (low, high) if low < high else (low - 1, high + 1)  # a level line is in the middle

    def place(exam: Mapping[str, float]) -> str:
        x = EDGE + (WIDTH - 2 * EDGE) * exam["step"] / (last or 1)
        y = HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * (exam[name] - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    return " ".join(map(place, exams))


def _check_origin(request: Request) -> None:
    """Refuses a form of another site's page."""
    origin = request.headers.get("origin", "")
    if not origin or urlsplit(origin).netloc != request.headers.get("host"):
        raise Refused(403, "this form came from a page of another site: open the console by its own address")


async def _fields(request: Request) -> Fields:
    body = await read_bytes(request, LARGEST_FORM)
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=32))
    except ValueError:
        raise wrong("this is no form in UTF-8: use the page's own") from None


def _number(fields: Fields, name: str) -> int | None:
    """Returns a field's whole number; None: it is empty."""
    value = fields.get(name, "").strip()
    if value and not (value.isdecimal() and value.isascii() and len(value) < 10):
        raise wrong(f"{name!r} is {shown(value)}: give a whole number", name)
    return int(value) if value else None


def _when(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else ""


def _to(path: str) -> Callable[[Request], Awaitable[Response]]:
    async def answered(_: Request) -> Response:
        return _back(path)

    return answered


def _back(path: str) -> RedirectResponse:
    return RedirectResponse(path, 303, SECURE)
