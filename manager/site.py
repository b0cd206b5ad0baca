"""A site has all that the endpoints of the manager work with. Requests to them have one form."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hplm.errors import InvalidInput
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import Given, check_no_other, shown
from manager.children import USUAL, Manner
from manager.domains import Domains
from manager.jobs import Jobs
from manager.models import Base, Models
from manager.records import Records, Row
from manager.rights import ASK, MANAGE, OPERATOR, Caller, Rights
from manager.running import Running
from manager.uploads import Uploads

ALLOWED = {ASK: {ASK, MANAGE, OPERATOR}, MANAGE: {MANAGE, OPERATOR}, OPERATOR: {OPERATOR}}  # roles, by the needed one
HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}  # of all answers


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


@dataclass(frozen=True)
class Site:
    records: Records
    rights: Rights
    uploads: Uploads
    models: Models
    domains: Domains
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
        domains = Domains(records, models.bases, changes, manner)
        jobs = Jobs(records, rights, kept, models, domains, folder / "jobs")
        running = Running(records, rights, kept, models, jobs, manner, at_once)
        return cls(records, rights, kept, models, domains, jobs, running, lock)

    def close(self) -> None:
        self.records.close()
        os.close(self.lock)

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


Act = Callable[[Site, Asked], Any]  # returns what is sent as JSON
Endpoint = tuple[str, str, str, Act]  # method, path, the needed role


def allowed(caller: Caller, role: str) -> Caller:
    """Returns a caller. Raises if it has not the needed role."""
    if caller.role not in ALLOWED[role]:
        raise Refused(403, f"this key has the role {caller.role!r}, and that needs {role!r}: use another key")
    return caller


def in_list(data: list[Any], more: bool = False) -> dict[str, Any]:
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": more}


def _locked(folder: Path) -> int:
    """Holds a folder for this process, until it ends or closes what this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InvalidInput(f"another manager has {folder}: stop it, or give another --folder") from None
    return handle
