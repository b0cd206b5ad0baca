"""The operators' pages of the console: replicas and the queue, owners and their limits, domains, and who did what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from hplm_openai.errors import Refused
from hplm_openai.fields import shown
from manager import operators
from manager.jobs import CORPORA
from manager.models import Base
from manager.pages import OPERATE, ROOT, Fields, Ids, Pages, fields_of, number, to
from manager.rights import OPERATOR, Caller
from manager.watching import Watching

DOMAINS = f"{ROOT}/domains"


class Operating:
    def __init__(self, pages: Pages, servers: Sequence[str]) -> None:
        """`servers`: HOST:PORT of their metrics."""
        self._pages, self._site, self._watching = pages, pages.site, Watching(servers)

    def routes(self) -> list[BaseRoute]:
        shown = {"/operate": self._operate, "/owners": self._owners, "/owners/{name}": self._owner, "/domains": self._domains}
        done = {
            "/owners": self._add_owner, "/owners/{name}": self._limit, "/records": self._add_record,
            "/domains/{id:path}/rollback": self._pages.doing(operators.roll_back_domain, DOMAINS),
            "/domains/{id:path}/delete": self._pages.doing(operators.delete_domain, DOMAINS), "/domains": self._build_domain,
        }  # fmt: skip
        return [
            *(self._pages.get(path, show, OPERATOR) for path, show in {**shown, "/log": self._log}.items()),
            *(self._pages.post(path, do, OPERATOR) for path, do in done.items()),
        ]

    async def _operate(self, request: Request, caller: Caller) -> Response:
        def read() -> dict[str, Any]:
            jobs = [self._site.jobs.told(job) for job in self._site.records.unended()]
            return {"replicas": self._watching.replicas(), "jobs": jobs, "bases": [_counted(one) for one in self._bases]}

        return self._pages.page("operate", caller, **await run_in_threadpool(read))

    async def _owners(
        self, request: Request, caller: Caller, made: Any = None, fields: Fields | None = None, error: Refused | None = None
    ) -> Response:
        owners = (await self._pages.do(caller, operators.owners))["data"]
        status, fields = error.status if error is not None else 200, defaultdict(str, fields or {})
        return self._pages.page(
            "owners", caller, status, owners=owners, made=made, fields=fields, error=error, backbones=[*self._site.models.bases]
        )

    async def _add_owner(self, request: Request, caller: Caller) -> Response:
        made = await self._pages.do(caller, operators.add_owner, name=(await fields_of(request)).get("name", "").strip())
        return await self._owners(request, caller, made)

    async def _owner(self, request: Request, caller: Caller) -> Response:
        name = request.path_params["name"]
        for owner in (await self._pages.do(caller, operators.owners))["data"]:
            if owner["id"] == name:
                return self._pages.page("owner", caller, owner=owner)
        raise Refused(404, f"there is no owner {shown(name)}")

    async def _limit(self, request: Request, caller: Caller) -> Response:
        fields: Fields = await fields_of(request)
        limits = {name: value for name in fields if (value := number(fields, name)) is not None}
        await self._pages.do(caller, operators.set_limits, request.path_params, limits=limits)
        return to(f"{ROOT}/owners")

    async def _add_record(self, request: Request, caller: Caller) -> Response:
        own = replace(caller, owner=None)  # the file is the operators'
        served, fields = await self._pages.begin(request, own, {"file": 1}, operators.add_record, _record_in)
        if isinstance(served, Refused):
            return await self._owners(request, caller, fields=fields, error=served)
        return to(f"{ROOT}/owners")

    async def _domains(
        self, request: Request, caller: Caller, fields: Fields | None = None, error: Refused | None = None
    ) -> Response:
        domains = (await self._pages.do(caller, operators.list_domains))["data"]
        status = error.status if error is not None else 200
        return self._pages.page(
            "domains", caller, status, domains=domains, fields=defaultdict(str, fields or {}), error=error, corpora=CORPORA,
            backbones=[*self._site.models.bases],
        )  # fmt: skip

    async def _build_domain(self, request: Request, caller: Caller) -> Response:
        own = replace(caller, owner=None)  # the job and the corpus are the operators'
        begun, fields = await self._pages.begin(request, own, {"corpus": 1}, operators.create_domain, _domain_in)
        if isinstance(begun, Refused):
            return await self._domains(request, caller, fields, begun)
        return to(f"{ROOT}/jobs/{begun['id']}" if caller == own else OPERATE)

    async def _log(self, request: Request, caller: Caller) -> Response:
        deeds = await self._pages.do(caller, operators.log, after=request.query_params.get("after"))
        return self._pages.page("log", caller, deeds=deeds)

    @property
    def _bases(self) -> list[Base]:
        return [*self._site.models.bases.values()]


def _counted(base: Base) -> dict[str, Any]:
    snapshot = base.manager.current()
    return {"name": base.name, "tenants": len(snapshot.tenants), "tables": len(snapshot.branches)}


def _record_in(fields: Fields, ids: Ids) -> dict[str, Any]:
    """Returns a form as a request for a model of a finished record."""
    return {**{name: fields.get(name, "").strip() for name in ("id", "model")}, "file": next(iter(ids["file"]), None)}


def _domain_in(fields: Fields, ids: Ids) -> dict[str, Any]:
    """Returns a form as a request for a domain."""
    options = {name: number(fields, name) for name in ("minutes", "keep")}
    texts = {name: fields.get(name, "").strip() for name in ("id", "parent")}
    return {**texts, **options, "corpus": next(iter(ids["corpus"]), None)}
