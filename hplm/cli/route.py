"""`hplm route`: writes the files of a HAProxy before several replicas, and keeps a running one up to date."""

from __future__ import annotations

import shlex
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.cli.serve import say, until_stopped
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from hplm.cluster.watching import Served


def route(
    *, cluster: Path, to: Path, watch: bool = False, address: str = "127.0.0.1", port: int = 8000, stats_port: int = 8404,
    stats_address: str = "127.0.0.1", routers: int = 1, unchecked: bool = False,
) -> None:  # fmt: skip
    """Write the file of a HAProxy that routes each tenant's requests to the replica that has its adapter.

    A tenant with quotas goes to its homes. docs/cluster.md describes cluster.json and how requests are routed.

    :param cluster: cluster.json: the replicas, in pools
    :param to: folder for HAProxy's files and its admin socket
    :param watch: change only the maps, of files and of the running HAProxy, until Ctrl-C or SIGTERM
    :param address: address to listen on: 127.0.0.1 is for this machine only, 0.0.0.0 for all networks
    :param port: for HTTP and gRPC
    :param stats_port: for statistics and /metrics; 0: none
    :param stats_address: address for them. They need no key: let only Prometheus reach another one
    :param routers: how many routers the clients use; each gives a replica its part of the requests at a time
    :param unchecked: write files for a HAProxy of another machine: none is needed here
    """
    from hplm.cluster import router
    from hplm.cluster.description import read_pools
    from hplm.cluster.watching import Served

    if to.exists() and not to.is_dir():
        raise InvalidInput(f"--to {to} is not a folder: name one for HAProxy's files")
    pools = read_pools(cluster)
    changes = any(pool.state is not None for pool in pools)
    if watch:
        if not changes:
            raise InvalidInput(f"{cluster} names no 'state', so its tenants never change: name it, or leave out --watch")
        follow(Served(pools), to)
        return
    served = Served(pools)
    if not unchecked:
        router.haproxy()  # a missing one is an error before anything is written
    routes = served.routes()
    if routes.conflicts:
        raise InvalidInput(routes.conflicts[0])
    probes = {pool.name: router.probes_of(pool.repository) for pool in pools}
    listening = router.Listening(address, port, stats_port, stats_address)
    router.write_files(router.router_files(pools, probes, routes, to, listening, routers), to)
    for note in routes.notes:
        print(f"note: {note}")
    for pool in pools:
        print(f"pool {pool.name}: {len(pool.replicas)} replicas, asked for {', '.join(sorted(probes[pool.name]))} each second")
    print(f"tenants with quotas, which have homes: {len(routes.homes)}")
    if unchecked:
        print(f"written: {to / router.CONFIG}, which no HAProxy has checked")
        return
    router.check_file(to)
    print(f"start:   {shlex.join(router.start_command(to))}")
    if changes:
        print(f"follow:  hplm route --cluster {shlex.quote(str(cluster))} --to {shlex.quote(str(to))} --watch")


def follow(served: Served, folder: Path) -> None:
    from hplm.cluster.router import check_folder
    from hplm.cluster.watching import Watcher
    from hplm.tenants.state import SECONDS_BETWEEN_LOOKS

    check_folder(folder)
    with until_stopped(), closing(Watcher(served, folder, say)) as watcher:
        while True:
            watcher.look()
            time.sleep(SECONDS_BETWEEN_LOOKS)
