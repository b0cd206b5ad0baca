"""The console: pages that show what the API tells, and forms that do what it does. They work without JavaScript."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from hplm.tenants.snapshot import QUOTAS
from hplm_openai.app import Gateway
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import shown
from manager import operating, owners
from manager.coverage import MEANINGS
from manager.jobs import DATA_FILES, told_event
from manager.operators import limit_model, told_owner
from manager.pages import Form, Page, Pages, Visit, fields_of
from manager.records import WAITING
from manager.rendering import page, part, to
from manager.rights import ASK, MANAGE, Caller
from manager.site import ALLOWED, HEADERS, Site
from manager.trying import ASKS, Trying
from manager.wishes import MOST_IMPORTED

MOST_JOBS, MOST_EVENTS, MOST_KEYS = "20", 100, "200"


class Console:
    def __init__(self, site: Site, gateway: Gateway, servers: Sequence[str] = ()) -> None:
        """`servers`: HOST:PORT of the metrics of the served replicas."""
        self._pages = Pages(site, [*PAGES, *operating.pages(servers)], [*FORMS, *operating.FORMS])
        self._trying = Trying(gateway, site.rights.secret)

    def routes(self) -> list[BaseRoute]:
        return self._pages.routes(*(self._pages.route(method, "/try/{id:path}", self._try) for method in ("GET", "POST")))

    async def _try(self, request: Request, caller: Caller) -> Response:
        fields = await fields_of(request) if request.method == "POST" else None
        visit = Visit(self._pages.site, caller, request.path_params, fields or {})
        model, others, waits = await run_in_threadpool(_tried, visit)
        if model["owned_by"] != caller.owner:
            return _begins(model)
        beside = visit.fields.get("beside") if fields is not None else waits
        asked = [model, *(one for one in others if one["id"] == beside)]
        text, answers, covered = visit.fields.get("text", ""), [], []
        if text.strip():
            served = [await run_in_threadpool(visit.site.models.find, visit.owner, one["id"]) for one in asked]
            branches = {(one.base.name, *one.tenant.branch_id): one for one in served}  # versions mostly have the same tables
            asking = asyncio.gather(*(self._trying.ask(request, one, text) for one in asked))
            covered = await asyncio.gather(*(self._trying.covered(one, text) for one in branches.values()))
            answers = await asking
        facts = {"model": model, "others": others, "beside": beside, "text": text, "answers": answers, "covered": covered}
        return page("try", caller, **facts, asks=ASKS, meanings=MEANINGS)


def models(visit: Visit) -> dict[str, Any]:
    jobs = visit.do(owners.list_jobs, limit=MOST_JOBS)["data"] if visit.caller.role in ALLOWED[MANAGE] else []
    return {"own": _both(visit)[1], "jobs": jobs}


def begin(visit: Visit) -> dict[str, Any]:
    """Returns what a form shows that begins a job."""
    bases, own = _both(visit)
    return {"bases": bases, "model": next((one for one in own if one["id"] == visit.fields.get("model")), None)}


def job(visit: Visit) -> dict[str, Any] | Response:
    """Returns what a job's page shows; an answer without content if the page that asks shows it already."""
    job = visit.do(owners.job)
    events = list(map(told_event, visit.site.records.events(job["id"])))
    exams = [event["data"] for event in events if event["type"] == "metrics"]
    files = {name: _name(visit, job[name]) if job[name] else None for name in DATA_FILES}
    facts = {"job": job, "exams": exams, "runs": job["status"] in WAITING, "files": files}
    live = part("live", **facts, events=events[: -MOST_EVENTS - 1 : -1])
    seen = hashlib.sha256(live.encode()).hexdigest()[:16]
    if visit.fields.get("seen") == seen:
        return Response(status_code=204, headers=HEADERS)
    return {**facts, "live": Markup(live), "seen": seen}


def model(visit: Visit) -> dict[str, Any] | Response:
    model = visit.do(owners.model)
    if model["owned_by"] != visit.caller.owner:
        return _begins(model)
    found = visit.site.models.find(visit.owner, model["id"])
    versions, number = model["hplm"]["versions"], visit.fields.get("version", "")
    number = int(number) if number in [str(one["version"]) for one in versions] else found.stored
    report = found.report(number)
    facts = {"model": model, "versions": versions, "number": number, "report": report, "asks": ASKS}
    return {**facts, "confused": _confused(report.get("confusion", {})), "quotas": (*QUOTAS, "deadline_us")}


def keys(visit: Visit) -> dict[str, Any]:
    found = visit.do(owners.keys, limit=MOST_KEYS)["data"]
    return {"keys": found, "own": told_owner(visit.site, visit.owner)}


def _begins(base: Any) -> Response:
    """Leads from what is no model yet to the form that makes one of it."""
    return to(f"/new?model={base['id']}")


def _both(visit: Visit) -> tuple[list[Any], list[Any]]:
    """Returns the models that everybody has, and those of an owner."""
    found = visit.do(owners.list_models)["data"]
    own = [model for model in found if model["owned_by"] == visit.caller.owner]
    return [model for model in found if model not in own], own


def _tried(visit: Visit) -> tuple[Any, list[Any], str | None]:
    """Returns a model, others that can be asked beside it, versions that wait first, and the first of these."""
    model = visit.do(owners.model)
    others = [one for one in _both(visit)[1] if one["id"] != model["id"] and one["hplm"]["task"] in ASKS]
    waiting = [one for one in others if one["hplm"]["candidate_of"] == model["id"]]
    others.sort(key=lambda one: one not in waiting)
    return model, others, waiting[0]["id"] if waiting else None


def _name(visit: Visit, id: str) -> str:
    with suppress(Refused):
        return visit.do(owners.file, {"id": id})["filename"]
    return "deleted"


def _confused(confusion: Mapping[str, Mapping[str, int]]) -> dict[str, list[tuple[str, int]]]:
    """Returns the wrong answers to each label, the most frequent first."""
    wrong = {
        right: sorted(((one, count) for one, count in answers.items() if one != right), key=lambda one: -one[1])
        for right, answers in confusion.items()
    }
    return {right: answers for right, answers in wrong.items() if answers}


def _job(_: Visit, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a form as a request for a job."""
    ours = {said: values.pop(name) for name, said in OURS.items() if name in values}
    ours |= {name: True for name in FLAGS if values.pop(name, None)}
    return {"hyperparameters": {"n_epochs": values.pop("n_epochs", None)}, "hplm": ours, **values}


def _deletion(visit: Visit, values: dict[str, Any]) -> dict[str, Any]:
    """Raises if the form does not say the name of what it deletes."""
    if (name := values.get("name", "")) != visit.path["id"]:
        raise wrong(f"you wrote {shown(name)}, so nothing was deleted: write the model's whole name, {visit.path['id']}")
    return {}


OURS = {"task": "task", "promote": "promote", "least": "least", "checkpoint": "import"}  # fields, as `hplm` calls them
FLAGS = ("best", "new_labels", "fresh")
MODEL = "/models/{id:path}"
PAGES = [
    Page("", ASK, "models", models),
    Page("/new", MANAGE, "new", begin),
    Page("/import", MANAGE, "import", begin),
    Page("/jobs/{id}", None, "job", job),
    Page("/keys", MANAGE, "keys", keys),
    Page(MODEL, ASK, "model", model),
]
FORMS = [
    Form("/new", owners.create_job, "/jobs/{id}", {"training_file": 1, "validation_file": 1}, _job),
    Form("/import", owners.create_job, "/jobs/{id}", {"checkpoint": MOST_IMPORTED, "training_file": 1}, _job),
    Form("/jobs/{id}/cancel", owners.cancel_job, "/jobs/{id}"),
    Form("/keys", owners.add_key, None),
    Form("/keys/{id}/revoke", owners.revoke_key, "/keys"),
    Form(f"{MODEL}/promote", owners.promote, "/models/{id}"),
    Form(f"{MODEL}/rollback", owners.roll_back, "/models/{id}"),
    Form(f"{MODEL}/limits", limit_model, "/models/{id}"),
    Form(f"{MODEL}/delete", owners.delete_model, "", asked=_deletion),
]
