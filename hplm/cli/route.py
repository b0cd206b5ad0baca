"""`hplm route`: writes the file of a HAProxy before several replicas."""

from __future__ import annotations

import shlex
from pathlib import Path

from hplm.errors import HplmError, InvalidInput

STATS = "127.0.0.1:8404"


def route(
    *, cluster: Path, to: Path, door: bool = False, address: str = "127.0.0.1", port: int = 8000, stats: str = STATS,
    routers: int = 1,
) -> None:  # fmt: skip
    """Write the file of a HAProxy that sends each tenant's requests to one of several replicas, which has its adapter.

    docs/cluster.md describes cluster.json and how requests are routed. Where this machine has a HAProxy, it checks the file.

    :param cluster: cluster.json: the replicas
    :param to: folder for HAProxy's files and its admin socket
    :param door: write the front door, with TLS and limits, instead of a router behind it. Variables are its settings
    :param address: address to listen on: 127.0.0.1 is for this machine only, 0.0.0.0 for all networks
    :param port: for HTTP and gRPC
    :param stats: HOST:PORT for statistics and /metrics, or none. They need no key: let only Prometheus reach another address
    :param routers: how many routers the clients use; each gives a replica its part of the requests at a time
    """
    from hplm.cluster import router
    from hplm.cluster.description import read_replicas

    if to.exists() and not to.is_dir():
        raise InvalidInput(f"--to {to} is not a folder: name one for HAProxy's files")
    described = read_replicas(cluster)
    repository = Path(described.repository)
    if not repository.is_dir():
        raise InvalidInput(f"{cluster}: repository {repository} is not a folder: correct its path")
    router.check_folder(to)
    probes = router.probes_of(repository)
    if door:
        config = router.door(described, probes, to)
    else:
        config = router.router(described, probes, to, router.Listening(address, port, stats), routers)
    router.write_files(config, to)
    print(f"{len(described.replicas)} replicas, asked for {', '.join(sorted(probes))} each second")
    try:
        start = router.start_command(to)
    except HplmError as error:
        print(f"written: {to / router.CONFIG}, which no HAProxy has checked, for another machine: {error}")
        return
    if not door:  # whose certificate is named when it starts
        router.check_file(to)
    print(f"start:   {shlex.join(start)}")
