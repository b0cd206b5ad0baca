"""`hplm route`: writes the files of a HAProxy before several replicas, and keeps a running one up to date."""

from __future__ import annotations

import argparse
import shlex
import signal
import time
from pathlib import Path


def register(commands) -> None:
    route = commands.add_parser(
        "route",
        help="route tenants to the replicas of a cluster with HAProxy",
        description="Write the file of a HAProxy that sends each tenant's requests to the replica that has its adapter, and a "
        "tenant with quotas to its homes. With --watch, keep the running HAProxy equal to the newest tenants. docs/cluster.md "
        "describes cluster.json and how requests are routed.",
    )
    route.add_argument("--cluster", type=Path, required=True, metavar="FILE", help="cluster.json: the replicas, in pools")
    route.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder for HAProxy's files and its admin socket")
    route.add_argument(
        "--address",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, for this machine only; 0.0.0.0: all networks)",
    )
    route.add_argument("--port", type=int, default=8000, help="for HTTP and gRPC (default: %(default)s)")
    route.add_argument(
        "--stats-port", type=int, default=8404, metavar="PORT",
        help="for statistics and /metrics; 0: none (default: %(default)s)",
    )  # fmt: skip
    route.add_argument(
        "--stats-address", default="127.0.0.1", metavar="ADDRESS",
        help="address for them. They need no key: let only Prometheus reach another one (default: %(default)s)",
    )  # fmt: skip
    route.add_argument(
        "--routers", type=int, default=1, metavar="N",
        help="how many routers the clients use; each gives a replica its part of the requests at a time (default: %(default)s)",
    )  # fmt: skip
    route.add_argument(
        "--unchecked", action="store_true", help="write files for a HAProxy of another machine: none is needed here"
    )
    route.add_argument(
        "--watch",
        action="store_true",
        help="change only the maps, of files and of the running HAProxy, until Ctrl-C or SIGTERM",
    )
    route.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from hplm.cluster.description import ClusterDescription
    from hplm.cluster.watching import Served
    from hplm.errors import InvalidInput

    cluster = ClusterDescription.read(args.cluster)
    if args.watch:
        if all(pool.state is None for pool in cluster.pools):
            raise InvalidInput(f"{args.cluster} names no 'state', so its tenants never change: name it, or leave out --watch")
        watch(Served(cluster), args.to)
        return
    write(args, cluster, Served(cluster))


def write(args: argparse.Namespace, cluster, served) -> None:
    from hplm.cluster.health import probes_of
    from hplm.cluster.router import CONFIG, Listening, check_file, haproxy, router_files, start_command, write_files
    from hplm.errors import InvalidInput

    if not args.unchecked:
        haproxy()  # a missing one is an error before anything is written
    routes = served.routes()
    if routes.conflicts:
        raise InvalidInput(routes.conflicts[0])
    probes = {pool.name: probes_of(pool.repository) for pool in cluster.pools}
    listening = Listening(args.address, args.port, args.stats_port, args.stats_address)
    write_files(router_files(cluster, probes, routes, args.to, listening, args.routers), args.to)
    for note in routes.notes:
        print(f"note: {note}")
    for pool in cluster.pools:
        print(f"pool {pool.name}: {len(pool.replicas)} replicas, asked for {', '.join(sorted(probes[pool.name]))} each second")
    print(f"tenants with quotas, which have homes: {len(routes.homes)}")
    if args.unchecked:
        print(f"written: {args.to / CONFIG}, which no HAProxy has checked")
        return
    check_file(args.to)
    print(f"start:   {shlex.join(start_command(args.to))}")
    print(f"follow:  hplm route --cluster {shlex.quote(str(args.cluster))} --to {shlex.quote(str(args.to))} --watch")


def watch(served, folder: Path) -> None:
    from hplm.cluster.router import check_folder
    from hplm.cluster.watching import Watcher
    from hplm.tenants.state import SECONDS_BETWEEN_LOOKS

    check_folder(folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # from here on SIGTERM and Ctrl-C are the same
    watcher = Watcher(served, folder, lambda line: print(line, flush=True))
    try:
        while True:
            watcher.look()
            time.sleep(SECONDS_BETWEEN_LOOKS)
    except KeyboardInterrupt:
        print("stopped", flush=True)
    finally:
        watcher.close()
