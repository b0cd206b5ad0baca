"""The operators' pages and forms: replicas and the queue, owners and their limits, domains, records, and who did what."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hplm_openai.errors import Refused
from hplm_openai.fields import shown
from manager import operators
from manager.jobs import CORPORA
from manager.models import Base
from manager.pages import OPERATE, Form, Page, Visit
from manager.rights import OPERATOR
from manager.watching import Watching


def operate(watching: Watching, visit: Visit) -> dict[str, Any]:
    jobs = [visit.site.jobs.told(job) for job in visit.site.records.unended()]
    return {"replicas": watching.replicas(), "jobs": jobs, "bases": list(map(_counted, visit.site.models.bases.values()))}


def owners(visit: Visit) -> dict[str, Any]:
    return {"owners": visit.do(operators.owners)["data"], "backbones": [*visit.site.models.bases]}


def owner(visit: Visit) -> dict[str, Any]:
    for one in visit.do(operators.owners)["data"]:
        if one["id"] == visit.path["name"]:
            return {"owner": one}
    raise Refused(404, f"there is no owner {shown(visit.path['name'])}")


def domains(visit: Visit) -> dict[str, Any]:
    found = visit.do(operators.list_domains)["data"]
    return {"domains": found, "corpora": CORPORA, "backbones": [*visit.site.models.bases]}


def log(visit: Visit) -> dict[str, Any]:
    return {"deeds": visit.do(operators.log, after=visit.fields.get("after"))}


def pages(servers: Sequence[str]) -> list[Page]:
    """`servers`: HOST:PORT of the metrics of the served replicas."""
    return [
        Page(OPERATE, OPERATOR, "operate", partial(operate, Watching(servers))),
        Page("/owners", OPERATOR, "owners", owners),
        Page("/owners/{name}", OPERATOR, "owner", owner),
        Page("/domains", OPERATOR, "domains", domains),
        Page("/log", OPERATOR, "log", log),
    ]


def _counted(base: Base) -> dict[str, Any]:
    snapshot = base.manager.current()
    return {"name": base.name, "tenants": len(snapshot.tenants), "tables": len(snapshot.branches)}


FORMS = [
    Form("/owners", operators.add_owner, None),
    Form("/owners/{name}", operators.set_limits, "/owners", asked=lambda _, values: {"limits": values}),
    Form("/records", operators.add_record, "/owners", {"file": 1}, page="/owners"),
    Form("/domains", operators.create_domain, "/jobs/{id}", {"corpus": 1}, elsewhere=OPERATE),
    Form("/domains/{id:path}/rollback", operators.roll_back_domain, "/domains"),
    Form("/domains/{id:path}/delete", operators.delete_domain, "/domains"),
]
