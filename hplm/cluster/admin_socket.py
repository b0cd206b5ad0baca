"""Commands to a running HAProxy, through its admin socket: what each replica gets, and the maps of tenants."""

from __future__ import annotations

import csv
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import HplmError, InvalidInput

SECONDS = 5.0
COMMANDS = 50  # in a message: HAProxy reads one of 64 KB at most
SERVERS = 4  # a type of statistics
LONGEST_PATH = 107  # bytes of a socket's path that Linux takes


class NotRunning(HplmError):
    """No process listens at the socket."""


@dataclass(frozen=True)
class Share:
    """A replica's part of the traffic, over all backends that it is in."""

    in_flight: int
    requests: int
    state: str  # up, down or draining


class AdminSocket:
    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, command: str) -> str:
        """Returns what HAProxy answers to a line of commands. Raises `NotRunning` if there is none."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SECONDS)
            try:
                connection.connect(str(self._path))
                connection.sendall(f"{command}\n".encode())
                return b"".join(iter(lambda: connection.recv(65536), b"")).decode()
            except OSError as error:
                kind = NotRunning if isinstance(error, ConnectionRefusedError | FileNotFoundError) else HplmError
                raise kind(f"HAProxy does not answer at {self._path} ({error.strerror or error}): start it") from None

    def pid(self) -> int:
        """Returns the process that answers. A restarted or reloaded HAProxy has another one."""
        found = re.search(r"^Pid: (\d+)", self.ask("show info"), re.MULTILINE)
        if found is None:
            raise HplmError(f"no HAProxy answers at {self._path}: start it with the file beside this socket")
        return int(found[1])

    def takes_commands(self) -> bool:
        """Whether HAProxy has made its socket, which may come later than its port."""
        try:
            return self.pid() > 0
        except HplmError:
            return False

    def statistics(self, types: int = -1) -> list[dict[str, str]]:
        """Returns what HAProxy counts for each frontend, backend and server. `types`: SERVERS for these alone."""
        table = self.ask(f"show stat -1 {types} -1").strip().removeprefix("# ")
        return list(csv.DictReader(table.splitlines()))

    def share(self, replica: str) -> Share:
        rows = self._rows(replica)
        is_up = bool(rows) and all(row["status"].startswith(("UP", "no check")) for row in rows)
        drains = any(row["status"].startswith("DRAIN") for row in rows)
        state = "draining" if drains else "up" if is_up else "down"
        return Share(sum(int(row["scur"]) for row in rows), sum(int(row["stot"]) for row in rows), state)

    def set_state(self, replica: str, state: str) -> None:
        """With `drain` a replica finishes its requests and gets no new ones; with `ready` it does, once it is found healthy."""
        rows = self._rows(replica)
        if not rows:
            raise HplmError(f"HAProxy knows no replica {replica!r}: has {self._path.parent} been written for another cluster?")
        for row in rows:
            if row["tracked"]:
                continue  # it is as the server that it tracks
            said = self.ask(f"set server {row['pxname']}/{replica} state {state}").strip()
            if said:
                raise HplmError(f"HAProxy does not set {row['pxname']}/{replica} to {state}: {said}")

    def _rows(self, replica: str) -> list[dict[str, str]]:
        """Returns the replica's statistics in each backend."""
        return [row for row in self.statistics(SERVERS) if row["svname"] == replica]

    def read_map(self, file: Path) -> dict[str, str]:
        """Returns the keys and values of a map, which HAProxy knows by its file."""
        answer = self.ask(f"show map {file}")
        lines = [line.split() for line in answer.splitlines() if line]
        if not all(len(line) == 3 for line in lines):
            raise HplmError(f"HAProxy at {self._path} has no map {file} ({answer.strip()}): start it with the file beside it")
        return {key: value for _, key, value in lines}

    def set_map(self, file: Path, wanted: Mapping[str, str]) -> None:
        """Makes a map equal to the wanted one."""
        known = self.read_map(file)
        commands = [f"del map {file} {key}" for key in known.keys() - wanted.keys()]
        changed = {key: value for key, value in wanted.items() if known.get(key) != value}
        commands += [f"{'set' if key in known else 'add'} map {file} {key} {value}" for key, value in changed.items()]
        for first in range(0, len(commands), COMMANDS):
            answer = self.ask("; ".join(commands[first : first + COMMANDS])).strip()
            if answer:
                raise HplmError(f"HAProxy at {self._path} does not change its map {file} ({answer}): restart it")


def check_socket_path(path: Path, option: str, longest: int = LONGEST_PATH) -> None:
    """Refuses a path that is too long. `option`: it names the folder of the socket."""
    if len(os.fsencode(path)) > longest:
        raise InvalidInput(f"{path} is too long for a socket ({longest} bytes at most): give {option} a shorter path")
