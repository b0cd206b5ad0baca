"""The manager's HTTP: OpenAI's files, fine-tuning and models, keys, and the gateway for all other paths."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from hplm.errors import HplmError, InvalidInput, NoTenant, logged_error
from hplm_openai.app import CLIENT_HAS_GONE, HEALTH, Gateway
from hplm_openai.connections import Entrance, Gone, read_body
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import Given, check_no_other, key_in, shown
from manager import uploads
from manager.children import USUAL, Manner
from manager.jobs import Jobs, told_event
from manager.models import Base, Models
from manager.records import DAY, File, Job, Key, Records, Row
from manager.rights import ASK, LIMITS, MANAGE, OPERATOR, Caller, Rights
from manager.running import Running
from manager.uploads import Uploads

LARGEST_BODY, AT_ONCE = 2_000_000, 256
EVENT_SECONDS = 0.5  # between looks for a job's new events
ALLOWED = {ASK: {ASK, MANAGE, OPERATOR}, MANAGE: {MANAGE, OPERATOR}, OPERATOR: {OPERATOR}}  # roles, by the needed one
ACTS_FOR = "openai-organization"  # the header in which an operator names an owner
STATUSES: dict[type[HplmError], int] = {InvalidInput: 400, NoTenant: 404}
log = logging.getLogger(__name__)
HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}


@dataclass(frozen=True)
class Asked:
    """One request to the manager, whose sender may send it."""

    caller: Caller
    path: dict[str, str] = field(default_factory=dict[str, str])  # what the path names
    given: Given = field(default_factory=dict[str, Any])  # fields of the body, or of the query

    @property
    def owner(self) -> str:
        return self.caller.acting_for()

    @property
    def who(self) -> str:
        return self.caller.key

    def done(self) -> None:
        """Raises if there is a field that nobody has taken."""
        check_no_other(self.given)


Act = Callable[[Asked], Any]  # returns what is sent as JSON
Endpoint = tuple[str, str, str, Act]  # method, path, the needed role


@dataclass(frozen=True)
class Site:
    """All that the endpoints of owners work with."""

    records: Records
    rights: Rights
    uploads: Uploads
    models: Models
    jobs: Jobs
    running: Running
    lock: int  # holds the folder

    @classmethod
    def open(cls, folder: Path, bases: Sequence[Base], manner: Manner = USUAL, at_once: int = 1) -> Site:
        """Opens the folder of a manager, which no other process may have open. `at_once`: jobs."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _locked(folder)
        (changes := folder / "changes").mkdir(exist_ok=True, mode=0o700)
        records = Records(folder / "records.db")
        rights = Rights(records, folder)
        kept = Uploads(records, rights, folder / "files")
        models = Models(records, rights, {base.name: base for base in bases}, changes, manner)
        jobs = Jobs(records, rights, kept, models, folder / "jobs")
        return cls(records, rights, kept, models, jobs, Running(records, rights, kept, models, jobs, manner, at_once), lock)

    def close(self) -> None:
        self.records.close()
        os.close(self.lock)

    async def enter(self, request: Request, role: str) -> Caller:
        """Returns who sends a request. Raises if their key does not allow this."""
        address = request.client.host if request.client is not None else ""
        secret, owner = key_in(request.headers.getlist("authorization")), request.headers.get(ACTS_FOR)
        caller = await run_in_threadpool(self.rights.caller, secret, address, owner)
        return allowed(caller, role)

    def listed(self, kind: type[Row], tell: Callable[[Row], Any], asked: Asked, order: str = "desc", **where: Any) -> Any:
        """Returns a page of an owner's things, as OpenAI's clients go through them."""
        after, limit = asked.given.pop("after", None), asked.given.pop("limit", "20")
        order = asked.given.pop("order", order)
        asked.done()
        if not (str(limit).isdecimal() and 1 <= int(limit) <= 10_000):
            raise wrong(f"'limit' is {shown(limit)}: give a whole number from 1 to 10,000", "limit")
        if order not in ("asc", "desc"):
            raise wrong(f"'order' is {shown(order)}: give asc or desc", "order")
        found = self.records.page(kind, asked.owner, after, int(limit), order == "desc", **where)
        if found is None:
            raise Refused(404, f"there is nothing with the id {shown(after)}: list from the beginning", param="after")
        return in_list(list(map(tell, found[0])), found[1])

    def files(self, asked: Asked) -> Any:
        purpose = asked.given.pop("purpose", None)
        return self.listed(File, uploads.told, asked, **({"purpose": purpose} if purpose is not None else {}))

    def file(self, asked: Asked) -> Any:
        return uploads.told(self.uploads.found(asked.owner, asked.path["id"]))

    def delete_file(self, asked: Asked) -> Any:
        self.uploads.delete(asked.owner, id := asked.path["id"], asked.who)
        return {"id": id, "object": "file", "deleted": True}

    async def add_file(self, request: Request, caller: Caller) -> Response:
        owner = caller.acting_for()
        form = await self.uploads.read(request, owner)
        return JSONResponse(uploads.told(await self.uploads.keep(form, owner, caller.key)))

    async def content(self, request: Request, caller: Caller) -> Response:
        file = await run_in_threadpool(self.uploads.found, caller.acting_for(), request.path_params["id"])
        return FileResponse(self.uploads.path(file), media_type="application/octet-stream", filename=file.name, headers=HEADERS)

    def create_job(self, asked: Asked) -> Any:
        return self.jobs.told(self.jobs.create(asked.owner, asked.who, asked.given))

    def list_jobs(self, asked: Asked) -> Any:
        return self.listed(Job, self.jobs.told, asked)

    def job(self, asked: Asked) -> Any:
        return self.jobs.told(self.jobs.found(asked.owner, asked.path["id"]))

    def cancel_job(self, asked: Asked) -> Any:
        asked.done()
        return self.jobs.told(self.running.cancel(asked.owner, asked.path["id"], asked.who))

    def checkpoints(self, asked: Asked) -> Any:
        return in_list(self.jobs.checkpoints(self.jobs.found(asked.owner, asked.path["id"])))

    async def events(self, request: Request, caller: Caller) -> Response:
        """Returns a page of a job's events, the newest first; or all as they come, with `Accept: text/event-stream`."""
        job = await run_in_threadpool(self.jobs.found, caller.acting_for(), request.path_params["id"])
        if "text/event-stream" in request.headers.get("accept", ""):
            last = request.headers.get("last-event-id", "0")
            after = int(last) if last.isdecimal() else 0
            return StreamingResponse(self._as_they_come(job, after), media_type="text/event-stream", headers=HEADERS)
        given = dict(request.query_params)
        after, limit = given.pop("after", None), given.pop("limit", "20")
        check_no_other(given)
        told = [*map(told_event, reversed(await run_in_threadpool(self.records.events, job.id)))]
        ids = [event["id"] for event in told]
        if not limit.isdecimal() or (after is not None and after not in ids):
            raise wrong("'limit' is no whole number, or 'after' no event of this job: leave them out", "after")
        told = told[ids.index(after) + 1 if after is not None else 0 :]
        return JSONResponse(in_list(told[: int(limit)], len(told) > int(limit)), headers=HEADERS)

    async def _as_they_come(self, job: Job, after: int) -> AsyncIterator[bytes]:
        while True:  # the job is read before its events: if it has ended, they are all there
            now = await run_in_threadpool(self.records.get, Job, job.id)
            for event in await run_in_threadpool(self.records.events, job.id, after):
                after = event.number
                yield f"id: {after}\ndata: {json.dumps(told_event(event))}\n\n".encode()
            if now is None or now.ended:
                yield b"data: [DONE]\n\n"
                return
            await asyncio.sleep(EVENT_SECONDS)

    def list_models(self, asked: Asked) -> Any:
        return in_list(self.models.listed(asked.owner))

    def model(self, asked: Asked) -> Any:
        return self.models.described(asked.owner, asked.path["id"])

    def delete_model(self, asked: Asked) -> Any:
        def cancel(job: Job) -> Job:
            return self.running.cancel(job.owner, job.id, asked.who)

        self.models.delete(asked.owner, id := asked.path["id"], asked.who, cancel)
        return {"id": id, "object": "model", "deleted": True}

    def promote(self, asked: Asked) -> Any:
        version = asked.given.pop("version", None)
        asked.done()
        return self.models.promote(asked.owner, asked.path["id"], version, asked.who)

    def roll_back(self, asked: Asked) -> Any:
        asked.done()
        return self.models.roll_back(asked.owner, asked.path["id"], asked.who)

    def limit(self, asked: Asked) -> Any:
        return self.models.limit(asked.owner, asked.path["id"], asked.given, asked.who)

    def add_key(self, asked: Asked) -> Any:
        role, days = asked.given.pop("role", ASK), asked.given.pop("days", 0)
        asked.done()
        secret, key = self.rights.add_key(asked.owner, role, days, asked.who)
        try:
            self.models.mend()
        except (HplmError, OSError) as error:  # the secret must not be lost
            log.warning("the key %s opens models in a minute: %s", key.id, error)
        return {**told_key(key), "secret": secret}

    def keys(self, asked: Asked) -> Any:
        return self.listed(Key, told_key, asked)

    def revoke_key(self, asked: Asked) -> Any:
        key = self.rights.revoke(asked.owner, asked.path["id"], asked.who)
        self.models.mend()
        return {**told_key(key), "deleted": True}

    def add_owner(self, asked: Asked) -> Any:
        name = asked.given.pop("name", None)
        asked.done()
        secret, key = self.rights.add_owner(name if isinstance(name, str) else "", asked.who)
        return {**self.told_owner(key.owner or ""), "key": {**told_key(key), "secret": secret}}

    def set_limits(self, asked: Asked) -> Any:
        limits = asked.given.pop("limits", None)
        asked.done()
        self.rights.set_limits(
            name := asked.path["name"], limits if isinstance(limits, dict) else {"limits": limits}, asked.who
        )
        return self.told_owner(name)

    def owners(self, asked: Asked) -> Any:
        asked.done()
        return in_list([self.told_owner(owner.id) for owner in self.records.owners()])

    def told_owner(self, name: str) -> dict[str, Any]:
        """Returns an owner with its limits, and what it uses of them."""
        then = time.time() - DAY
        used = {
            "bytes": self.records.bytes_of(name), "jobs_a_day": self.records.jobs_since(name, then),
            "minutes_a_day": round(self.records.seconds_since(name, then) / 60, 1), "tenants": len(self.models.served(name)),
        }  # fmt: skip
        return {"id": name, "object": "owner", "limits": {one: self.rights.limit(name, one) for one in LIMITS}, "used": used}

    def log(self, asked: Asked) -> Any:
        """Returns what was done, the newest first."""
        before, limit = asked.given.pop("after", None), asked.given.pop("limit", "100")
        asked.done()
        if not limit.isdecimal() or not (before is None or before.isdecimal()):
            raise wrong("'limit' or 'after' is no whole number: give one, or leave it out", "limit")
        found = self.records.deeds(int(before) if before is not None else None, int(limit))
        return in_list([{**asdict(deed), "id": str(deed.number)} for deed in found], len(found) == int(limit))

    def endpoints(self) -> list[Endpoint]:
        job, model = "/v1/fine_tuning/jobs/{id}", "/v1/models/{id:path}"
        return [
            ("POST", "/v1/fine_tuning/jobs", MANAGE, self.create_job),
            ("GET", "/v1/fine_tuning/jobs", MANAGE, self.list_jobs),
            ("GET", job, MANAGE, self.job),
            ("POST", f"{job}/cancel", MANAGE, self.cancel_job),
            ("GET", f"{job}/checkpoints", MANAGE, self.checkpoints),
            ("GET", "/v1/models", ASK, self.list_models),
            ("POST", f"{model}/promote", MANAGE, self.promote),
            ("POST", f"{model}/rollback", MANAGE, self.roll_back),
            ("POST", f"{model}/limits", OPERATOR, self.limit),
            ("GET", model, ASK, self.model),
            ("DELETE", model, MANAGE, self.delete_model),
            ("POST", "/v1/keys", MANAGE, self.add_key),
            ("GET", "/v1/keys", MANAGE, self.keys),
            ("DELETE", "/v1/keys/{id}", MANAGE, self.revoke_key),
            ("POST", "/v1/owners", OPERATOR, self.add_owner),
            ("GET", "/v1/owners", OPERATOR, self.owners),
            ("POST", "/v1/owners/{name}", OPERATOR, self.set_limits),
            ("GET", "/v1/log", OPERATOR, self.log),
            ("GET", "/v1/files", MANAGE, self.files),
            ("GET", "/v1/files/{id}", MANAGE, self.file),
            ("DELETE", "/v1/files/{id}", MANAGE, self.delete_file),
        ]

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self._answered(MANAGE, self.add_file), methods=["POST"]),
            Route("/v1/files/{id}/content", self._answered(MANAGE, self.content), methods=["GET"]),
            Route("/v1/fine_tuning/jobs/{id}/events", self._answered(MANAGE, self.events), methods=["GET"]),
            *(Route(path, self._acted(role, act), methods=[method]) for method, path, role, act in self.endpoints()),
        ]

    def _answered(
        self, role: str, answer: Callable[[Request, Caller], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            return await answer(request, await self.enter(request, role))

        return answered

    def _acted(self, role: str, act: Act) -> Callable[[Request], Awaitable[Response]]:
        async def acted(request: Request) -> Response:
            caller = await self.enter(request, role)
            given: Given = dict(request.query_params)
            if request.method == "POST":
                for name in given:
                    raise wrong(f"the address has the parameter {shown(name)}: send fields in the body", name[:256])
                is_empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
                body = {} if is_empty else await read_body(request, LARGEST_BODY)
                given = {name: one for name, one in body.items() if one is not None}
            return JSONResponse(await run_in_threadpool(act, Asked(caller, request.path_params, given)), headers=HEADERS)

        return acted


def application(site: Site, gateway: Gateway, more: Sequence[BaseRoute] = ()) -> ASGIApp:
    """Returns the whole app. `more`: further routes, such as a console's."""
    asking = gateway.inner()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with asking.router.lifespan_context(asking):
            site.running.start()
            yield
            await run_in_threadpool(site.running.stop)

    handlers = dict.fromkeys((Refused, HplmError, HTTPException, Gone, Exception), _told)
    app = Starlette(routes=[*site.routes(), *more], exception_handlers=handlers, lifespan=lifespan)
    app.router.default = asking
    return Entrance(app, AT_ONCE, exempt=HEALTH)


def allowed(caller: Caller, role: str) -> Caller:
    """Returns a caller. Raises if it has not the needed role."""
    if caller.role not in ALLOWED[role]:
        raise Refused(403, f"this key has the role {caller.role!r}, and that needs {role!r}: use another key")
    return caller


def _locked(folder: Path) -> int:
    """Holds a folder for this process, until it ends or closes what this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InvalidInput(f"another manager has {folder}: stop it, or give another --folder") from None
    return handle


def told_key(key: Key) -> dict[str, Any]:
    state = {"expires_at": key.expires or None, "revoked_at": key.revoked or None}
    return {"id": key.id, "object": "key", "role": key.role, "created_at": key.created, **state}


def in_list(data: list[Any], more: bool = False) -> dict[str, Any]:
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": more}


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
