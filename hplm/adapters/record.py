"""The place of a tenant's weights. No torch here: the alias only follows snapshots and starts without it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

ENDING = ".safetensors"
_DIGEST = 24  # characters


@dataclass(frozen=True)
class Record:
    """A head, an adapter or exits, of a tenant or a student, in a record file (`hplm.adapters.records`)."""

    file: str = field(hash=False)  # name
    layout: str = field(hash=False)  # `Layout.key`
    offset: int = field(hash=False)  # bytes
    checksum: int  # CRC-32 of the weights


def file_name(content: bytes, unique: str = "") -> str:
    """Returns the name of a record file with this content. `unique`: what it begins with, so that it is not used twice."""
    return f"{unique}{hashlib.sha256(content).hexdigest()[:_DIGEST]}{ENDING}"


def has_content(name: str, content: bytes) -> bool:
    """Whether this is the content of a record file of this name."""
    return name.endswith(file_name(content))
