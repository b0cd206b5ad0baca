"""Rights: owners, their keys, operators' keys, and sessions of a browser."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from itsdangerous import BadSignature, URLSafeTimedSerializer

from hplm.clock import Clock
from hplm.errors import InvalidInput
from hplm.tenants import keys
from hplm_openai.errors import Refused
from hplm_openai.fields import shown
from manager.records import OPERATORS, ROLES, Key, Owner, Records

ASK, MANAGE, OPERATOR = ROLES
COMMAND_LINE = "command line"  # who has done what no key has
OWNER = re.compile(r"[a-z0-9][a-z0-9_-]{0,23}")  # without a dot, which ends it in the names of its tenants
MOST_WRONG, WRONG_SECONDS = 10, 60.0  # wrong keys of an address
MOST_ADDRESSES = 10_000  # that are remembered
SESSION_SECONDS = 12 * 3600
MOST_KEYS = 100  # valid ones of an owner: each is in all its tenants
LIMITS = {  # of an owner, unless others are set
    "bytes": 2_000_000_000, "file_bytes": 256_000_000, "lines": 1_000_000, "labels": 1000, "jobs_a_day": 50,
    "minutes_a_day": 600, "tenants": 100,
}  # fmt: skip


@dataclass(frozen=True)
class Caller:
    """The sender of a request: a key, and the owner it acts for."""

    key: str  # its id
    role: str
    owner: str | None  # None: an operator who names none

    def acting_for(self) -> str:
        return self.owner or OPERATORS


class Rights:
    def __init__(self, records: Records, folder: Path, clock: Clock = time) -> None:
        """`folder`: has the manager's own secrets, each in a file that only this user can read."""
        self._records, self._clock = records, clock
        self._wrong: dict[str, deque[float]] = {}  # when each address has sent wrong keys, the oldest address first
        self._signer = URLSafeTimedSerializer(own_secret(folder / "sessions.key"), salt="session")
        self.secret = own_secret(folder / "manager.key")  # opens all managed tenants, so that none is ever open to everybody

    def caller(self, secret: str | None, address: str, owner: str | None = None) -> Caller:
        """Returns who sends a secret. `owner`: for whom an operator acts.

        A right key passes also from an address of many wrong ones: others may send theirs through the same proxy.
        """
        key = self._records.key_of(digest_of(secret)) if secret else None
        if key is None or not self.is_valid(key):
            self._count_wrong(address)
            raise Refused(
                401, "this key is unknown, or not valid any more: send 'authorization: Bearer KEY'", "invalid_api_key"
            )
        return self._caller(key, owner)

    def is_valid(self, key: Key) -> bool:
        return not key.revoked and (not key.expires or self._clock.time() < key.expires)

    def sign(self, caller: Caller) -> str:
        """Returns what a browser's cookie holds: the key's id, signed."""
        return self._signer.dumps(caller.key)

    def signed(self, cookie: str, owner: str | None = None) -> Caller:
        """Returns whose session a cookie is. The key is looked up, so its end is the session's."""
        with suppress(BadSignature):
            key = self._records.get(Key, self._signer.loads(cookie, max_age=SESSION_SECONDS))
            if key is not None and self.is_valid(key):
                return self._caller(key, owner)
        raise Refused(401, "the session has ended: paste the key again", "invalid_api_key")

    def add_owner(self, name: str, who: str) -> tuple[str, Key]:
        """Adds an owner with a first key, which manages. Returns its secret and the key."""
        if not OWNER.fullmatch(name):
            raise InvalidInput(f"owner {name!r}: use 1-24 lower-case letters, digits, '_' and '-', no leading sign")
        with self._records.together():
            if self._records.get(Owner, name) is not None:
                raise InvalidInput(f"there is an owner {name!r}: choose another name")
            self._records.add(Owner(name, int(self._clock.time()), {}))
            self._records.note(who, name, "owner add")
            return self.add_key(name, MANAGE, 0, who)

    def add_key(self, owner: str | None, role: str, days: float, who: str) -> tuple[str, Key]:
        """Makes a key. Returns its secret, which is not stored, and the key. `owner` None: of operators."""
        if role not in ((OPERATOR,) if owner is None else (ASK, MANAGE)):
            raise InvalidInput(f"role {shown(role)}: give an owner's key the role {ASK!r} or {MANAGE!r}")
        expires = keys.expiry(days)
        with self._records.together():
            if owner is not None and self._records.get(Owner, owner) is None:
                raise InvalidInput(f"there is no owner {owner!r}: add it by `hplm manager owner add`")
            valid = [key for key in self._records.keys(owner) if self.is_valid(key)]
            if len(valid) >= MOST_KEYS:
                raise InvalidInput(f"there are {len(valid)} valid keys, and {MOST_KEYS} at most: revoke one first")
            secret, made = keys.new_key(expires)
            key = Key(f"key-{made.id}", owner, role, made.digest, int(self._clock.time()), expires, 0)
            self._records.add(key)
            self._records.note(who, owner, "key add", key=key.id, role=role, expires=expires)
        return secret, key

    def revoke(self, owner: str | None, id: str, who: str) -> Key:
        """Refuses a key from now on, here. Whoever calls this takes it out of the tenants too.

        An owner's last key that manages stays: nobody else could make another one.
        """
        with self._records.together():
            key = self._records.get(Key, id)
            if key is None or key.owner != owner:
                raise Refused(404, f"no such key: {shown(id)}", param="id")
            others = [one for one in self._records.keys(owner) if one.id != id and self.is_valid(one)]
            if self.is_valid(key) and not any(one.role == key.role for one in others) and key.role != ASK:
                raise Refused(409, f"{id!r} is the last key of the role {key.role!r}: make another one first", param="id")
            key = replace(key, revoked=key.revoked or int(self._clock.time()))
            self._records.change(Key, id, revoked=key.revoked)
            self._records.note(who, owner, "key revoke", key=id)
            return key

    def limit(self, owner: str, name: str) -> int:
        found = self._records.get(Owner, owner)
        return (found.limits if found is not None else {}).get(name, LIMITS[name])

    def set_limits(self, owner: str, given: Mapping[str, object], who: str) -> dict[str, int]:
        """Sets some limits of an owner. Returns all."""
        for name, value in given.items():
            if name not in LIMITS or type(value) is not int or not 0 <= value < 2**53:
                raise InvalidInput(f"limit {shown(name)} is {shown(value)}: give a whole number for one of {', '.join(LIMITS)}")
        with self._records.together():
            if (found := self._records.get(Owner, owner)) is None:
                raise Refused(404, f"no such owner: {shown(owner)}")
            limits: dict[str, Any] = {**found.limits, **given}
            self._records.change(Owner, owner, limits=limits)
            self._records.note(who, owner, "owner limits", limits=limits)
        return {**LIMITS, **limits}

    def _caller(self, key: Key, owner: str | None) -> Caller:
        if key.role == OPERATOR and owner is not None and self._records.get(Owner, owner) is None:
            raise Refused(404, f"no such owner: {shown(owner)}")
        return Caller(key.id, key.role, owner if key.role == OPERATOR else key.owner)

    def _count_wrong(self, address: str) -> None:
        """Raises if an address has sent many wrong keys in the last minute."""
        now = self._clock.monotonic()
        times = self._wrong.pop(address, None) or deque[float](maxlen=MOST_WRONG)
        self._wrong[address] = times
        if len(self._wrong) > MOST_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]
        if len(times) == MOST_WRONG and (left := WRONG_SECONDS - (now - times[0])) > 0:
            after = {"retry-after": str(int(left) + 1)}
            raise Refused(429, f"{MOST_WRONG} wrong keys came from this address: wait", "rate_limit_exceeded", headers=after)
        times.append(now)


def digest_of(secret: str) -> str:
    return keys.key_of(secret).digest


def own_secret(path: Path) -> str:
    """Returns the secret in a file, which is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            file.write(keys.new_key()[0])
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process has made it
            os.link(temporary, path)
        temporary.unlink()
    return path.read_text("utf-8").strip()
