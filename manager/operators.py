"""The endpoints of operators: owners and their limits, quotas of models, domains, records of tenants, and who did what."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from hplm_openai.errors import wrong
from hplm_openai.fields import shown
from manager.jobs import SUFFIX
from manager.owners import MODEL, told_key
from manager.records import DAY, Owner
from manager.rights import LIMITS, OPERATOR
from manager.site import Asked, Endpoint, Site, in_list


def add_owner(site: Site, asked: Asked) -> Any:
    name = asked.given.pop("name", None)
    asked.done()
    secret, key = site.rights.add_owner(name if isinstance(name, str) else "", asked.who)
    return {**told_owner(site, key.owner or ""), "key": {**told_key(key), "secret": secret}}


def set_limits(site: Site, asked: Asked) -> Any:
    limits, name = asked.given.pop("limits", None), asked.path["name"]
    asked.done()
    site.rights.set_limits(name, limits if isinstance(limits, dict) else {"limits": limits}, asked.who)
    return told_owner(site, name)


def owners(site: Site, asked: Asked) -> Any:
    asked.done()
    return in_list([told_owner(site, owner.id) for owner in site.records.owners()])


def told_owner(site: Site, name: str) -> dict[str, Any]:
    """Returns an owner with its limits, and what it uses of them."""
    then = time.time() - DAY
    used = {
        "bytes": site.records.bytes_of(name), "jobs_a_day": site.records.jobs_since(name, then),
        "minutes_a_day": round(site.records.seconds_since(name, then) / 60, 1), "tenants": len(site.models.served(name)),
    }  # fmt: skip
    return {"id": name, "object": "owner", "limits": {one: site.rights.limit(name, one) for one in LIMITS}, "used": used}


def limit_model(site: Site, asked: Asked) -> Any:
    return site.models.limit(asked.owner, asked.path["id"], asked.given, asked.who)


def create_domain(site: Site, asked: Asked) -> Any:
    return site.jobs.told(site.jobs.create_domain(asked.owner, asked.who, asked.given))


def list_domains(site: Site, asked: Asked) -> Any:
    asked.done()
    return in_list(site.domains.listed())


def domain(site: Site, asked: Asked) -> Any:
    return site.domains.described(asked.path["id"])


def roll_back_domain(site: Site, asked: Asked) -> Any:
    asked.done()
    return site.domains.roll_back(asked.path["id"], asked.who)


def delete_domain(site: Site, asked: Asked) -> Any:
    site.domains.delete(id := asked.path["id"], asked.who, lambda job: site.running.cancel(job.owner, job.id, asked.who))
    return {"id": id, "object": "domain", "deleted": True}


def add_record(site: Site, asked: Asked) -> Any:
    """Serves a record file as a model of the owner that its name begins with."""
    id, model, file = (asked.given.pop(name, None) for name in ("id", "model", "file"))
    asked.done()
    owner, _, suffix = id.partition(".") if isinstance(id, str) else ("", "", "")
    if site.records.get(Owner, owner) is None or (id != owner and not SUFFIX.fullmatch(suffix)):
        raise wrong(f"'id' is {shown(id)}: give OWNER or OWNER.NAME of an owner, such as GET /v1/owners lists", "id")
    if not isinstance(model, str) or (base := site.models.bases.get(model)) is None:
        raise wrong(f"'model' is {shown(model)}: give the backbone, {' or '.join(site.models.bases)}", "model")
    found = site.uploads.found(asked.owner, file) if isinstance(file, str) else None
    if found is None or found.ending != ".safetensors":
        raise wrong(f"'file' is {shown(file)}: give the id of a record file that ends in .safetensors", "file")
    site.models.check_free(owner, id, base, "id")
    return site.models.add_record(owner, id, base, site.uploads.path(found), found.name, asked.who)


def log(site: Site, asked: Asked) -> Any:
    """Returns what was done, the newest first."""
    before, limit = asked.given.pop("after", None), asked.given.pop("limit", "100")
    asked.done()
    if not limit.isdecimal() or not (before is None or before.isdecimal()):
        raise wrong("'limit' or 'after' is no whole number: give one, or leave it out", "limit")
    found = site.records.deeds(int(before) if before is not None else None, int(limit))
    return in_list([{**asdict(deed), "id": str(deed.number)} for deed in found], len(found) == int(limit))


DOMAIN = "/v1/domains/{id:path}"
ENDPOINTS: list[Endpoint] = [
    ("POST", "/v1/owners", OPERATOR, add_owner),
    ("GET", "/v1/owners", OPERATOR, owners),
    ("POST", "/v1/owners/{name}", OPERATOR, set_limits),
    ("POST", f"{MODEL}/limits", OPERATOR, limit_model),
    ("POST", "/v1/domains", OPERATOR, create_domain),
    ("GET", "/v1/domains", OPERATOR, list_domains),
    ("GET", DOMAIN, OPERATOR, domain),
    ("POST", f"{DOMAIN}/rollback", OPERATOR, roll_back_domain),
    ("DELETE", DOMAIN, OPERATOR, delete_domain),
    ("POST", "/v1/records", OPERATOR, add_record),
    ("GET", "/v1/log", OPERATOR, log),
]
