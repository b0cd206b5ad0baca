"""Place of a tenant's weights: a record of a bank. No torch here: the alias only follows snapshots and starts without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """The place of a record, and the uid and version that it must have."""

    bank: str  # file name
    index: int
    uid: int
    version: int
