"""API keys: which secrets open a tenant. Only their digests are stored.

SHA-256 without salt or stretching is enough here: those guard words that people choose, and a secret of ours is 192 random
bits, which nobody finds by trying. In return checking a key costs about a microsecond.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hplm.errors import InvalidInput

PREFIX = "hplm_"  # by which scanners of code and logs know a secret of ours
LONGEST_DAYS = 100_000
_SECRET_BYTES = 24


@dataclass(frozen=True)
class Key:
    id: str  # names it in lists; says nothing of the secret
    digest: str  # SHA-256 of the secret, hexadecimal
    expires: int  # Unix seconds; 0: never


def new_key(expires: int = 0) -> tuple[str, Key]:
    """The secret, which can be shown now and never again, and what is stored of it."""
    secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    return secret, Key(secrets.token_hex(4), _digest(secret), expires)


def expiry(days: float) -> int:
    """Of a key that is made now, in Unix seconds; 0 for one that does not expire."""
    if type(days) not in (int, float) or not 0 <= days <= LONGEST_DAYS:
        raise InvalidInput(f"'days' is {days!r}: from 0 to {LONGEST_DAYS:,}, 0 for a key that does not expire")
    return round(time.time() + 86400 * days) if days else 0


def without(keys: Sequence[Key], key_id: str, tenant_id: str) -> tuple[Key, ...]:
    """The tenant's other keys. The last one stays: without any, a tenant is open to everybody."""
    left = tuple(key for key in keys if key.id != key_id)
    if len(left) == len(keys):
        known = ", ".join(key.id for key in keys) or "none"
        raise InvalidInput(f"tenant {tenant_id!r} has no key {key_id!r}: it has {known}")
    if not left:
        raise InvalidInput(
            f"{key_id!r} is the last key of tenant {tenant_id!r}, which would be open to everybody without: add "
            "another one first, or delete the tenant"
        )
    return left


def key_of(secret: str) -> Key:
    """Of a secret that somebody else has made; a file it was read from may have ended its last line."""
    return Key("given", _digest(secret.strip()), 0)


def allows(keys: Sequence[Key], header_value: str | None, now: float) -> bool:
    """Whether `Bearer SECRET` opens what has these keys; without keys it is open to all.

    Every key is looked at whatever the others said, so that the time taken tells nothing about which of them fits.
    """
    scheme, _, secret = (header_value or "").strip().partition(" ")
    presented = _digest(secret.strip())
    fits = False
    for key in keys:
        same = hmac.compare_digest(key.digest.encode(), presented.encode())
        fits |= same & (key.expires == 0 or now < key.expires)
    return not keys or (fits and scheme.lower() == "bearer")


def presented_key(parameters: Mapping[str, object]) -> str | None:
    """The authorization header among a request's parameters, where Triton puts forwarded ones in the client's own case.

    Two that differ are none: which of them counts must not depend on the order they came in.
    """
    values = {value for name, value in parameters.items() if name.lower() == "authorization"}
    value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, str) else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
