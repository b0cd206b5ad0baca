"""The endpoints of owners: OpenAI's files, fine-tuning and models, and keys."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from hplm.errors import HplmError
from hplm_openai.errors import wrong
from hplm_openai.fields import check_no_other
from manager import uploads
from manager.jobs import told_event
from manager.records import File, Job, Key
from manager.rights import ASK, MANAGE, Caller
from manager.site import HEADERS, Asked, Endpoint, Site, in_list

EVENT_SECONDS = 0.5  # between looks for a job's new events
log = logging.getLogger(__name__)


async def add_file(site: Site, request: Request, caller: Caller) -> Response:
    owner = caller.acting_for()
    async with site.uploads.form(request, owner) as (fields, came):
        kept = await site.uploads.keep(next(iter(came.get(uploads.FILE, ())), None), fields, owner, caller.key)
    return JSONResponse(uploads.told(kept))


def files(site: Site, asked: Asked) -> Any:
    purpose = asked.given.pop("purpose", None)
    return site.listed(File, uploads.told, asked, **({"purpose": purpose} if purpose is not None else {}))


def file(site: Site, asked: Asked) -> Any:
    return uploads.told(site.uploads.found(asked.owner, asked.path["id"]))


async def content(site: Site, request: Request, caller: Caller) -> Response:
    found = await run_in_threadpool(site.uploads.found, caller.acting_for(), request.path_params["id"])
    return FileResponse(site.uploads.path(found), media_type="application/octet-stream", filename=found.name, headers=HEADERS)


def delete_file(site: Site, asked: Asked) -> Any:
    site.uploads.delete(asked.owner, id := asked.path["id"], asked.who)
    return {"id": id, "object": "file", "deleted": True}


def create_job(site: Site, asked: Asked) -> Any:
    return site.jobs.told(site.jobs.create(asked.owner, asked.who, asked.given))


def list_jobs(site: Site, asked: Asked) -> Any:
    return site.listed(Job, site.jobs.told, asked)


def job(site: Site, asked: Asked) -> Any:
    return site.jobs.told(site.jobs.found(asked.owner, asked.path["id"]))


def cancel_job(site: Site, asked: Asked) -> Any:
    asked.done()
    return site.jobs.told(site.running.cancel(asked.owner, asked.path["id"], asked.who))


def checkpoints(site: Site, asked: Asked) -> Any:
    return in_list(site.jobs.checkpoints(site.jobs.found(asked.owner, asked.path["id"])))


async def events(site: Site, request: Request, caller: Caller) -> Response:
    """Returns a page of a job's events, the newest first; or all as they come, with `Accept: text/event-stream`."""
    found = await run_in_threadpool(site.jobs.found, caller.acting_for(), request.path_params["id"])
    if "text/event-stream" in request.headers.get("accept", ""):
        last = request.headers.get("last-event-id", "0")
        coming = _as_they_come(site, found, int(last) if last.isdecimal() else 0)
        return StreamingResponse(coming, media_type="text/event-stream", headers=HEADERS)
    given = dict(request.query_params)
    after, limit = given.pop("after", None), given.pop("limit", "20")
    check_no_other(given)
    told = [*map(told_event, reversed(await run_in_threadpool(site.records.events, found.id)))]
    ids = [event["id"] for event in told]
    if not limit.isdecimal() or (after is not None and after not in ids):
        raise wrong("'limit' is no whole number, or 'after' no event of this job: leave them out", "after")
    told = told[ids.index(after) + 1 if after is not None else 0 :]
    return JSONResponse(in_list(told[: int(limit)], len(told) > int(limit)), headers=HEADERS)


async def _as_they_come(site: Site, of: Job, after: int) -> AsyncIterator[bytes]:
    while True:  # the job is read before its events: if it has ended, they are all there
        now = await run_in_threadpool(site.records.get, Job, of.id)
        for event in await run_in_threadpool(site.records.events, of.id, after):
            after = event.number
            yield f"id: {after}\ndata: {json.dumps(told_event(event))}\n\n".encode()
        if now is None or now.ended:
            yield b"data: [DONE]\n\n"
            return
        await asyncio.sleep(EVENT_SECONDS)


def list_models(site: Site, asked: Asked) -> Any:
    return in_list(site.models.listed(asked.owner))


def model(site: Site, asked: Asked) -> Any:
    return site.models.described(asked.owner, asked.path["id"])


def delete_model(site: Site, asked: Asked) -> Any:
    def cancel(one: Job) -> Job:
        return site.running.cancel(one.owner, one.id, asked.who)

    site.models.delete(asked.owner, id := asked.path["id"], asked.who, cancel)
    return {"id": id, "object": "model", "deleted": True}


def promote(site: Site, asked: Asked) -> Any:
    version = asked.given.pop("version", None)
    asked.done()
    return site.models.promote(asked.owner, asked.path["id"], version, asked.who)


def roll_back(site: Site, asked: Asked) -> Any:
    asked.done()
    return site.models.roll_back(asked.owner, asked.path["id"], asked.who)


def add_key(site: Site, asked: Asked) -> Any:
    role, days = asked.given.pop("role", ASK), asked.given.pop("days", 0)
    asked.done()
    secret, key = site.rights.add_key(asked.owner, role, days, asked.who)
    try:
        site.models.mend()
    except (HplmError, OSError) as error:  # the secret must not be lost
        log.warning("the key %s opens models in a minute: %s", key.id, error)
    return {**told_key(key), "secret": secret}


def keys(site: Site, asked: Asked) -> Any:
    return site.listed(Key, told_key, asked)


def revoke_key(site: Site, asked: Asked) -> Any:
    key = site.rights.revoke(asked.owner, asked.path["id"], asked.who)
    site.models.mend()
    return {**told_key(key), "deleted": True}


def told_key(key: Key) -> dict[str, Any]:
    state = {"expires_at": key.expires or None, "revoked_at": key.revoked or None}
    return {"id": key.id, "object": "key", "role": key.role, "created_at": key.created, **state}


Answer = Callable[[Site, Request, Caller], Awaitable[Response]]
FILE, JOB, MODEL = "/v1/files/{id}", "/v1/fine_tuning/jobs/{id}", "/v1/models/{id:path}"
ENDPOINTS: list[Endpoint] = [
    ("GET", "/v1/files", MANAGE, files),
    ("GET", FILE, MANAGE, file),
    ("DELETE", FILE, MANAGE, delete_file),
    ("POST", "/v1/fine_tuning/jobs", MANAGE, create_job),
    ("GET", "/v1/fine_tuning/jobs", MANAGE, list_jobs),
    ("GET", JOB, MANAGE, job),
    ("POST", f"{JOB}/cancel", MANAGE, cancel_job),
    ("GET", f"{JOB}/checkpoints", MANAGE, checkpoints),
    ("GET", "/v1/models", ASK, list_models),
    ("POST", f"{MODEL}/promote", MANAGE, promote),
    ("POST", f"{MODEL}/rollback", MANAGE, roll_back),
    ("GET", MODEL, ASK, model),
    ("DELETE", MODEL, MANAGE, delete_model),
    ("POST", "/v1/keys", MANAGE, add_key),
    ("GET", "/v1/keys", MANAGE, keys),
    ("DELETE", "/v1/keys/{id}", MANAGE, revoke_key),
]
OTHERS: list[tuple[str, str, Answer]] = [  # whose body or answer is no JSON; all need the role manage
    ("POST", "/v1/files", add_file),
    ("GET", f"{FILE}/content", content),
    ("GET", f"{JOB}/events", events),
]
