"""API keys of tenants. Only digests of their secrets are stored.

SHA-256 without salt or stretching is enough here. Salt and stretching protect passwords that people choose, but our secrets are
192 random bits, which nobody can guess. In return, checking a key takes about a microsecond.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from hplm.errors import InvalidInput

PREFIX = "hplm_"  # lets scanners of code and logs recognise our secrets
LONGEST_DAYS = 100_000
_SECRET_BYTES = 24
_GIVEN = re.compile(r"([0-9a-f]{64})(?:\s+(?:-|(\d{1,12})))?")  # the dash is of sha256sum


@dataclass(frozen=True)
class Key:
    id: str  # its name in lists; independent of the secret
    digest: str  # SHA-256 of the secret, hexadecimal
    expires: int  # Unix seconds; 0: never


def new_key(expires: int = 0) -> tuple[str, Key]:
    """Makes a key. Returns its secret, which is not stored, and the key as it is stored."""
    secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    return secret, Key(secrets.token_hex(4), _digest(secret), expires)


def expiry(days: float) -> int:
    """Returns the time at which a key of today expires, in Unix seconds; 0: never."""
    if type(days) not in (int, float) or not 0 <= days <= LONGEST_DAYS:
        raise InvalidInput(f"'days' is {days!r}: give a number up to {LONGEST_DAYS:,}, or 0 for a key that does not expire")
    return round(time.time() + 86400 * days) if days else 0


def without(keys: Sequence[Key], key_id: str, tenant_id: str) -> tuple[Key, ...]:
    """Returns the tenant's other keys. Refuses to remove the last one: a tenant without keys is open to everybody."""
    left = tuple(key for key in keys if key.id != key_id)
    if len(left) == len(keys):
        known = ", ".join(key.id for key in keys) or "none"
        raise InvalidInput(f"tenant {tenant_id!r} has no key {key_id!r}: its keys are {known}")
    if not left:
        raise InvalidInput(
            f"{key_id!r} is the last key of tenant {tenant_id!r}, which would be open to everybody without it: add "
            "another key first, or delete the tenant"
        )
    return left


def key_of(secret: str) -> Key:
    """Returns the key of a secret that an operator has made. Ignores white space around it, such as a file's last newline."""
    return Key("given", _digest(secret.strip()), 0)


def key_of_digest(digest: str, expires: int = 0) -> Key:
    """Returns the key of a secret of which only the SHA-256 is known, hexadecimal."""
    return Key(secrets.token_hex(4), digest, expires)


def read_keys(path: Path) -> list[Key]:
    """Returns the keys of a file: a line has the SHA-256 of a secret, and perhaps the Unix second at which it expires."""
    found: dict[str, Key] = {}
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), 1):
        if given := _GIVEN.fullmatch(line.strip()):
            found[given[1]] = key_of_digest(given[1], int(given[2] or 0))
        elif line.strip():  # it may be a secret, which nobody must see
            raise InvalidInput(f"{path}:{number}: no SHA-256 of a secret: write it by `printf %s SECRET | sha256sum`")
    if not found:
        raise InvalidInput(f"{path} has no key, and without one a tenant is open to everybody: give a SHA-256 a line")
    return [*found.values()]


def further(keys: Sequence[Key], given: Sequence[Key]) -> list[Key]:
    """Returns those of the given keys that are not among these."""
    known = {key.digest for key in keys}
    return [key for key in given if key.digest not in known]


def by_digest(keys: Sequence[Key]) -> dict[str, float]:
    """Returns until when each digest is valid."""
    found: dict[str, float] = {}
    for key in keys:
        found[key.digest] = max(found.get(key.digest, 0), key.expires or inf)
    return found


def allows(keys: Mapping[str, float], header_value: str | None, now: float) -> bool:
    """Whether `Bearer SECRET` matches one of these keys (`by_digest`). Without keys, everybody is allowed.

    It takes one digest and one look-up, however many keys there are. How long that takes tells nothing: nobody can choose the
    digest of a secret.
    """
    scheme = (header_value or "").strip().partition(" ")[0]
    is_valid = now < keys.get(digest_in(header_value), 0)
    return not keys or (is_valid and scheme.lower() == "bearer")


def digest_in(header_value: str | None) -> str:
    """Returns the digest of the secret in `Bearer SECRET`."""
    return _digest((header_value or "").strip().partition(" ")[2].strip())


def presented_key(parameters: Mapping[str, object]) -> str | None:
    """Returns the authorization header. Triton adds it to a request's parameters, in the client's upper and lower case.

    Returns None if there are several different values: their order must not decide which one counts.
    """
    values = {value for name, value in parameters.items() if name.lower() == "authorization"}
    value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, str) else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
