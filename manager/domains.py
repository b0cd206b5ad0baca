"""The domains of all backbones, as operators see and change them. A domain's id is BACKBONE/DOMAIN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hplm.plot.meta import TableMeta
from hplm.tenants.snapshot import NAME
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import shown
from manager.children import Manner, finish
from manager.models import Base
from manager.records import Job, Records


class Domains:
    def __init__(self, records: Records, bases: dict[str, Base], folder: Path, manner: Manner) -> None:
        self._records, self._bases, self._folder = records, bases, folder
        self._manner = replace(manner, is_awaited=True)

    def named(self, id: object) -> tuple[Base, str]:
        """Returns the backbone and the domain of an id, which may be of a new domain."""
        backbone, _, domain = id.partition("/") if isinstance(id, str) else ("", "", "")
        if (base := self._bases.get(backbone)) is None or not NAME.fullmatch(domain):
            known = ", ".join(self._bases)
            raise wrong(f"'id' is {shown(id)}: give BACKBONE/DOMAIN, with the backbone {known} and a lower-case name", "id")
        return base, domain

    def found(self, id: str) -> tuple[Base, str]:
        """Returns the same of a domain that is served, or in the store."""
        base, _, domain = id.partition("/")
        if base not in self._bases or not (domain in _served(self._bases[base]) or self._bases[base].domain_versions(domain)):
            raise Refused(404, f"no such domain: {shown(id)}; GET /v1/domains lists them", param="id")
        return self._bases[base], domain

    def listed(self) -> list[dict[str, Any]]:
        return [_told(base, name) for base in self._bases.values() for name in base.domains()]

    def described(self, id: str) -> dict[str, Any]:
        return _told(*self.found(id))

    def roll_back(self, id: str, who: str) -> dict[str, Any]:
        """Lets the tenants of the newest served version return to the version that they had before."""
        base, domain = self.found(id)
        self._records.note(who, None, "domain rollback", domain=id)
        base.manager.roll_back_domain(domain)
        base.manager.settle()
        return self.described(id)

    def delete(self, id: str, who: str, cancel: Callable[[Job], object]) -> None:
        """Deletes a domain that nobody needs, where it is served and in the store. The same call finishes a broken one.

        `cancel`: ends a job.
        """
        base, domain = self.found(id)
        self._records.note(who, None, "domain delete", domain=id)
        for job in self._records.jobs_of(id):
            if not job.ended:
                cancel(job)
        if domain in _served(base):
            base.manager.delete_domain(domain)
            base.manager.settle()
        if base.domain_versions(domain):
            with TemporaryDirectory(dir=self._folder) as folder:
                finish(["domain", "delete", "--name", domain, "--store", base.store], Path(folder), self._manner)


def _served(base: Base) -> set[str]:
    return {branch.domain for branch in base.manager.current().branches}


def _told(base: Base, name: str) -> dict[str, Any]:
    """Returns a domain with its versions in the store, and who uses them."""
    snapshot = base.manager.current()
    served, used = {branch.id for branch in snapshot.branches}, Counter(tenant.branch_id for tenant in snapshot.tenants)
    metas = [TableMeta.load(base.store / "plot" / name / str(one) / "meta.json") for one in base.domain_versions(name)]
    versions = [
        {
            "version": one.version, "parent": one.parent, "parent_version": one.parent_version, "ngrams": one.keys,
            "tokens": one.corpus_tokens, "mb": one.megabytes, "served": (name, one.version) in served,
            "tenants": used[name, one.version],
        }
        for one in metas
    ]  # fmt: skip
    return {"id": f"{base.name}/{name}", "object": "domain", "versions": versions}
