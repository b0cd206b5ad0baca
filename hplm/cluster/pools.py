"""The replicas of a cluster on this machine, and the pools that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import InvalidInput


@dataclass(frozen=True)
class Replica:
    """A server that is to run here. Its place on the router's ring depends on its id."""

    id: int
    repository: Path
    cores: tuple[int, ...] = ()  # none: all

    @property
    def name(self) -> str:
        return f"replica-{self.id}"


@dataclass(frozen=True)
class Pool:
    """Replicas that serve the same tenants. `state`: the truth about these tenants, which the replicas follow."""

    name: str
    repository: Path
    state: Path
    replicas: tuple[Replica, ...]


def replicas_of(repository: Path, count: int, cores: Sequence[int] = ()) -> tuple[Replica, ...]:
    """Divides the cores among so many replicas of a repository."""
    if count < 1:
        raise InvalidInput(f"--replicas {count}: give 1 or more")
    if len(set(cores)) < len(cores):
        raise InvalidInput(f"--cores {','.join(map(str, cores))} names a core twice: give each core once")
    if cores and len(cores) < count:
        raise InvalidInput(
            f"--cores names {len(cores)} cores for {count} replicas: give each replica at least one, or leave out --cores"
        )
    each = len(cores) // count
    return tuple(Replica(i + 1, repository, tuple(cores[i * each : (i + 1) * each])) for i in range(count))
