"""Requests on their way through HAProxy: how many each replica has, and whether it gets new ones. Through the admin socket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hplm.cluster.admin_socket import SERVERS, AdminSocket
from hplm.errors import HplmError


@dataclass(frozen=True)
class Share:
    """A replica's part of the traffic, over all backends that it is in."""

    in_flight: int
    requests: int
    is_up: bool
    drains: bool

    @property
    def word(self) -> str:
        return "draining" if self.drains else "up" if self.is_up else "down"


class Traffic:
    def __init__(self, path: Path) -> None:
        """`path`: the admin socket."""
        self._path = path
        self._socket = AdminSocket(path)

    def takes_commands(self) -> bool:
        """Whether HAProxy has made its socket, which may come later than its port."""
        try:
            return self._socket.pid() > 0
        except HplmError:
            return False

    def share(self, replica: str) -> Share:
        rows = self._rows(replica)
        return Share(
            in_flight=sum(int(row["scur"]) for row in rows),
            requests=sum(int(row["stot"]) for row in rows),
            is_up=bool(rows) and all(row["status"].startswith(("UP", "no check")) for row in rows),
            drains=any(row["status"].startswith("DRAIN") for row in rows),
        )

    def drain(self, replica: str) -> None:
        """Lets a replica finish its requests and gives it no new ones."""
        self._set(replica, "drain")

    def give_back(self, replica: str) -> None:
        """Gives requests to a replica again, as soon as its health is checked."""
        self._set(replica, "ready")

    def _set(self, replica: str, state: str) -> None:
        rows = self._rows(replica)
        if not rows:
            raise HplmError(f"HAProxy knows no replica {replica!r}: has {self._path.parent} been written for another cluster?")
        for row in rows:
            if row["tracked"]:
                continue  # it is as the server that it tracks
            said = self._socket.ask(f"set server {row['pxname']}/{replica} state {state}").strip()
            if said:
                raise HplmError(f"HAProxy does not set {row['pxname']}/{replica} to {state}: {said}")

    def _rows(self, replica: str) -> list[dict[str, str]]:
        """Returns the replica's statistics in each backend."""
        return [row for row in self._socket.statistics(SERVERS) if row["svname"] == replica]
