"""Where a registry lies: in a folder of this machine, or in a bucket of an object store."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from hplm.errors import InvalidInput

SCHEMES = ("s3", "gs", "az")
_MISTYPED = re.compile(rf"({'|'.join(SCHEMES)})(:|//)", re.IGNORECASE)  # such as s3:/bucket; a folder may be ./s3:


class Remote:
    """The address of a bucket, or of a part of it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url


Location = Path | Remote


def location_of(text: str) -> Location:
    """Reads the option --state: a folder, or the address of a bucket."""
    scheme, found, rest = text.partition("://")
    if not found and not _MISTYPED.match(text):
        return Path(text)
    if scheme not in SCHEMES or not rest:
        raise InvalidInput(
            f"{text!r} is no place for a registry: give a folder, or an address such as s3://bucket/folder; "
            "a folder of that name is ./NAME"
        )
    return Remote(text)


def local_folder(location: Location) -> Path:
    """Returns the folder that a server reads: of a bucket, its copy on this machine."""
    if isinstance(location, Path):
        return location
    cache = os.environ.get("HPLM_MIRROR") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hplm"
    return Path(cache) / hashlib.sha256(str(location).encode()).hexdigest()[:12]
