"""The owners' console: pages that show what the API tells, and forms that do what it does. They work without JavaScript."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
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
from manager import owners
from manager.coverage import MEANINGS
from manager.jobs import DATA_FILES, told_event
from manager.operating import Operating
from manager.operators import limit_model, told_owner
from manager.pages import ROOT, Fields, Pages, fields_of, number, to
from manager.records import WAITING
from manager.rights import MANAGE, Caller
from manager.site import ALLOWED, HEADERS, Site
from manager.trying import ASKS, Trying
from manager.wishes import MOST_IMPORTED

MOST_JOBS, MOST_EVENTS, MOST_KEYS = "20", 100, "200"
WIDTH, HEIGHT, EDGE = 600, 160, 8  # of a curve
FORMS = {  # that begin a job: how many files each of their fields may have
    "new": {"training_file": 1, "validation_file": 1}, "import": {"checkpoint": MOST_IMPORTED, "training_file": 1},
}  # fmt: skip


class Console:
    def __init__(self, site: Site, gateway: Gateway, servers: Sequence[str] = ()) -> None:
        """`servers`: HOST:PORT of the metrics of the served replicas."""
        self._site, self._pages = site, Pages(site, curve=_curve)
        self._operating = Operating(self._pages, servers)
        self._trying = Trying(gateway, site.rights.secret)

    def routes(self) -> list[BaseRoute]:
        get, post, doing, model = self._pages.get, self._pages.post, self._pages.doing, "/models/{id:path}"
        begins = [
            route
            for name in FORMS
            for route in (
                get(f"/{name}", partial(self._new, name), MANAGE),
                post(f"/{name}", partial(self._create, name), MANAGE),
            )
        ]
        return self._pages.routes(
            get("", self._models), *begins, get("/jobs/{id}", self._job, None),
            post("/jobs/{id}/cancel", doing(owners.cancel_job, f"{ROOT}/jobs/{{id}}"), None),
            get("/keys", self._keys, MANAGE), post("/keys", self._add_key),
            post("/keys/{id}/revoke", doing(owners.revoke_key, f"{ROOT}/keys")),
            *(post(f"{model}/{name}", doing(act, f"{ROOT}/models/{{id}}")) for name, act in (
                ("promote", owners.promote), ("rollback", owners.roll_back), ("limits", limit_model)
            )),
            post(f"{model}/delete", self._delete), get(model, self._model),
            get("/try/{id:path}", self._try), post("/try/{id:path}", self._try), *self._operating.routes(),
        )  # fmt: skip

    async def _models(self, request: Request, caller: Caller) -> Response:
        _, own = await self._both(caller)
        manages = caller.role in ALLOWED[MANAGE]
        jobs = (await self._pages.do(caller, owners.list_jobs, limit=MOST_JOBS))["data"] if manages else []
        return self._pages.page("models", caller, own=own, jobs=jobs)

    async def _both(self, caller: Caller) -> tuple[list[Any], list[Any]]:
        """Returns the models that everybody has, and those of an owner."""
        found = (await self._pages.do(caller, owners.list_models))["data"]
        own = [model for model in found if model["owned_by"] == caller.owner]
        return [model for model in found if model not in own], own

    async def _new(
        self, form: str, request: Request, caller: Caller, fields: Fields | None = None, error: Refused | None = None
    ) -> Response:
        """Shows a form of FORMS, after an error with what was in its fields."""
        bases, own = await self._both(caller)
        fields = defaultdict(str, fields if fields is not None else request.query_params)
        model = next((model for model in own if model["id"] == fields["model"]), None)
        status = error.status if error is not None else 200
        return self._pages.page(form, caller, status, bases=bases, model=model, fields=fields, error=error)

    async def _create(self, form: str, request: Request, caller: Caller) -> Response:
        begun, fields = await self._pages.begin(request, caller, FORMS[form], owners.create_job, partial(_wanted, form))
        if isinstance(begun, Refused):
            return await self._new(form, request, caller, fields, begun)
        return to(f"{ROOT}/jobs/{begun['id']}")

    async def _job(self, request: Request, caller: Caller) -> Response:
        job = await self._pages.do(caller, owners.job, request.path_params)
        events = [told_event(event) for event in await run_in_threadpool(self._site.records.events, job["id"])]
        exams = [event["data"] for event in events if event["type"] == "metrics"]
        files = {name: await self._name(caller, job[name]) if job[name] else None for name in DATA_FILES}
        runs = job["status"] in WAITING
        facts = {"job": job, "exams": exams, "events": events[: -MOST_EVENTS - 1 : -1], "runs": runs, "files": files}
        live = self._pages.template("live.html").render(**facts)
        seen = hashlib.sha256(live.encode()).hexdigest()[:16]
        if request.query_params.get("seen") == seen:
            return Response(status_code=204, headers=HEADERS)
        return self._pages.page("job", caller, **facts, live=Markup(live), seen=seen)

    async def _name(self, caller: Caller, id: str) -> str:
        with suppress(Refused):
            return (await self._pages.do(caller, owners.file, {"id": id}))["filename"]
        return "deleted"

    async def _model(self, request: Request, caller: Caller) -> Response:
        model = await self._pages.do(caller, owners.model, request.path_params)
        if model["owned_by"] != caller.owner:
            return to(f"{ROOT}/new?model={model['id']}")
        found = await run_in_threadpool(self._site.models.find, caller.acting_for(), model["id"])
        versions = model["hplm"]["versions"]
        number = request.query_params.get("version", str(found.stored))
        if number not in [str(one["version"]) for one in versions]:
            number = str(found.stored)
        report = await run_in_threadpool(found.report, int(number))
        return self._pages.page(
            "model", caller, model=model, versions=versions, number=int(number), report=report,
            confused=_confused(report.get("confusion", {})), asks=ASKS, quotas=(*QUOTAS, "deadline_us"),
        )  # fmt: skip

    async def _delete(self, request: Request, caller: Caller) -> Response:
        name, id = (await fields_of(request)).get("name", "").strip(), request.path_params["id"]
        if name != id:
            raise wrong(f"you wrote {shown(name)}, so nothing was deleted: write the model's whole name, {id}")
        await self._pages.do(caller, owners.delete_model, request.path_params)
        return to(ROOT)

    async def _keys(self, request: Request, caller: Caller, made: Any = None) -> Response:
        keys = (await self._pages.do(caller, owners.keys, limit=MOST_KEYS))["data"]
        own = await run_in_threadpool(told_owner, self._site, caller.acting_for())
        return self._pages.page("keys", caller, keys=keys, own=own, made=made)

    async def _add_key(self, request: Request, caller: Caller) -> Response:
        fields = await fields_of(request)
        made = await self._pages.do(caller, owners.add_key, role=fields.get("role"), days=number(fields, "days"))
        return await self._keys(request, caller, made)

    async def _try(self, request: Request, caller: Caller) -> Response:
        model = await self._pages.do(caller, owners.model, request.path_params)
        _, own = await self._both(caller)
        others = [one for one in own if one["id"] != model["id"] and one["hplm"]["task"] in ASKS]
        mine = [one for one in others if one["hplm"]["candidate_of"] == model["id"]]  # versions that wait come first
        fields = await fields_of(request) if request.method == "POST" else {"beside": mine[0]["id"]} if mine else {}
        asked = [model, *(one for one in others if one["id"] == fields.get("beside"))]
        text, answers, covered = fields.get("text", ""), [], []
        if text.strip():
            served = [await run_in_threadpool(self._site.models.find, caller.acting_for(), one["id"]) for one in asked]
            branches = {(one.base.name, *one.tenant.branch_id): one for one in served}  # versions mostly have the same tables
            asking = asyncio.gather(*(self._trying.ask(request, one, text) for one in asked))
            covered = await asyncio.gather(*(self._trying.covered(one, text) for one in branches.values()))
            answers = await asking
        others.sort(key=lambda one: one not in mine)
        return self._pages.page(
            "try", caller, model=model, others=others, fields=fields, text=text, answers=answers, covered=covered, asks=ASKS,
            meanings=MEANINGS,
        )  # fmt: skip


def _wanted(form: str, fields: Fields, ids: Mapping[str, list[str]]) -> dict[str, Any]:
    """Returns a form as a request for a job."""
    ours = {name: value for name in ("task", "promote") if (value := fields.get(name))}
    ours |= {name: True for name in ("best", "new_labels", "fresh") if fields.get(name)}
    if form == "import":
        ours |= {"import": ids["checkpoint"], "least": number(fields, "least")}
    return {
        "model": fields.get("model"), "suffix": fields.get("suffix", "").strip(), "hplm": ours,
        "hyperparameters": {"n_epochs": number(fields, "n_epochs")}, **{name: ids[name][0] for name in DATA_FILES if ids[name]},
    }  # fmt: skip


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
