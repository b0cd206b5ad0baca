"""Keeps the maps of a running HAProxy equal to the newest snapshots. Its files too, for its next start.

A watcher is a reader of the states, so commands such as `hplm tenant limit` wait until HAProxy has the change. They do not
wait while no HAProxy runs: it starts with the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hplm.cluster.admin_socket import AdminSocket, NotRunning
from hplm.cluster.description import Pool
from hplm.cluster.router import HOMES, POOLS, SOCKET, map_files, write_files
from hplm.cluster.routes import Routes, routes_of
from hplm.errors import HplmError, InvalidInput
from hplm.tenants.directory import Directory
from hplm.tenants.state import Reader, State, may_not_write

Generations = dict[tuple[str, str], int]  # by pool and backbone
Say = Callable[[str], None]


class Served:
    """The newest tenants of each pool."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        for pool in pools:
            for what, place in (("repository", pool.repository), ("state", pool.state)):
                if isinstance(place, Path) and not place.is_dir():
                    raise InvalidInput(f"pool {pool.name!r}: {what} {place} is not a folder: correct its path")
        self._pools = pools
        self._directories = {pool.name: Directory(pool.repository, pool.state) for pool in pools}

    def generations(self) -> Generations:
        """Reads the newest snapshots and returns their generations. What cannot be read is logged, and stays as it was."""
        found: Generations = {}
        for pool, directory in self._directories.items():
            directory.look()
            found |= {(pool, backbone): generation for backbone, generation in directory.generations().items()}
        return found

    def readers(self) -> dict[tuple[str, str], Reader]:
        """Returns a new reader of each state, by pool and backbone."""
        return {
            (pool.name, backbone): Reader(State(pool.state / backbone))
            for pool in self._pools
            if isinstance(pool.state, Path)  # nobody reports to a bucket
            for backbone in self._directories[pool.name].generations()
        }

    def routes(self) -> Routes:
        served = {
            name: [tenant for snapshot in directory.snapshots() for tenant in snapshot.tenants]
            for name, directory in self._directories.items()
        }
        return routes_of(self._pools, served)


class Watcher:
    """Call `look` again and again, and `close` at the end. It says each problem once, and goes on when that has passed."""

    def __init__(self, served: Served, folder: Path, say: Say) -> None:
        self._served = served
        self._folder = folder.resolve()
        self._say = say
        self._socket = AdminSocket(self._folder / SOCKET)
        self._routes = Routes()
        self._generations: Generations | None = None  # None: it has not looked yet
        self._taken: Generations | None = {}  # those whose routes HAProxy has; None while none runs
        self._readers = served.readers()
        self._unwritten = False
        self._told: int | None = None  # the process that has the routes
        self._problems: dict[str, str] = {}  # by what could not be done

    def look(self) -> None:
        generations = self._served.generations()
        if generations != self._generations:
            self._take(self._served.routes())
            self._generations = generations
        if self._unwritten:
            self._try("write", self._write)
        self._try("tell", self._tell)
        for place in list(self._readers):
            self._try(f"report {place}", partial(self._report, place))

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _take(self, routes: Routes) -> None:
        before, self._routes = self._routes, routes
        for line in (*routes.conflicts, *routes.notes):
            if line not in (*before.conflicts, *before.notes):
                self._say(line)
        if self._generations is None or (before.pools, before.homes) != (routes.pools, routes.homes):
            self._unwritten, self._told = True, None
            self._say(f"routes: {len(routes.pools)} tenants in other pools, {len(routes.homes)} with quotas have homes")

    def _write(self) -> None:
        write_files(map_files(self._routes), self._folder)
        self._unwritten = False

    def _tell(self) -> None:
        try:
            answering = self._socket.pid()
        except NotRunning:
            self._taken = None
            raise
        self._taken = self._taken or {}
        if answering != self._told:
            for file, wanted in ((POOLS, self._routes.pools), (HOMES, self._routes.homes)):
                self._socket.set_map(self._folder / file, wanted)
            self._told = answering
        self._taken = self._generations

    def _report(self, place: tuple[str, str]) -> None:
        """Tells commands that change this state which generation HAProxy routes by, if one runs."""
        if self._taken is None:
            self._readers[place].close()
            return
        try:
            self._readers[place].say(self._taken.get(place, 0))
        except OSError as error:
            if not may_not_write(error):
                raise
            del self._readers[place]
            self._say(f"commands do not wait for this router, because it may not write into the state: {error}")

    def _try(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
            if self._problems.pop(what, None):
                self._say("that has passed: HAProxy has the newest routes" if what == "tell" else "that has passed")
        except (HplmError, OSError) as error:
            if self._problems.get(what) != str(error):
                self._problems[what] = str(error)
                self._say(str(error))
