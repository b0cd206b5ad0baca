"""Writes the files of the router: a stock HAProxy that sends each tenant's requests to the replica that has its adapter."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hplm.cluster import haproxy_config as parts
from hplm.cluster.admin_socket import check_socket_path
from hplm.cluster.description import LARGEST_PORT, ClusterDescription, Pool, Replica, is_address
from hplm.cluster.routes import Routes
from hplm.errors import HplmError, InvalidInput
from hplm.server.probing import Probe
from hplm.server.process import program
from hplm.tenants.authorize import HEADER, UNSEEN
from hplm.tenants.snapshot import NAME

CONFIG, SOCKET, SCRIPT, POOLS, HOMES = "haproxy.cfg", "haproxy.sock", "tenant.lua", "pools.map", "homes.map"
LONGEST_SOCKET = 93  # bytes of a path: HAProxy first makes the socket under a longer name
FOLDER = re.compile(r"[A-Za-z0-9/._+@=-]+")  # of which HAProxy reads no character as its own
# Requests of each replica over HTTP at a time, from all routers: of more than 277 together Triton may lose answers
# (docs/triton.md).
AT_ONCE, LIMITED_AT_ONCE = 160, 96
READ_BYTES = 50_000  # of a body that is searched for the tenant as a whole; HAProxy's buffer holds a little more


@dataclass(frozen=True)
class Listening:
    """Where the router listens. HTTP and gRPC share the port."""

    address: str = "127.0.0.1"
    port: int = 8000
    stats_port: int = 8404  # 0: none
    stats_address: str = "127.0.0.1"


def router_files(
    cluster: ClusterDescription,
    probes: Mapping[str, Mapping[str, Probe]],
    routes: Routes,
    folder: Path,
    listening: Listening,
    routers: int = 1,
) -> dict[str, str]:
    """Returns the content of each file by its name.

    `probes`: those of each pool's models. `routers`: how many such routers divide what each replica may get.
    """
    check_folder(folder)
    if not 1 <= routers <= LIMITED_AT_ONCE:
        raise InvalidInput(f"--routers {routers}: give 1 to {LIMITED_AT_ONCE}")
    check_listening(listening)
    pools = "\n".join(_backends(pool, probes[pool.name], routers) for pool in cluster.pools)
    config = parts.HEAD.substitute(
        folder=folder.resolve(),
        bind=f"{listening.address}:{listening.port}",
        header=HEADER,
        unseen=UNSEEN,
        name=NAME.pattern,
        first=cluster.pools[0].name,
        others=_choice_by_model(cluster, probes),
        read_bytes=READ_BYTES,
        stats=parts.STATS.substitute(bind=f"{listening.stats_address}:{listening.stats_port}") if listening.stats_port else "",
        resolvers=parts.RESOLVERS if any(map(_is_name, cluster.pools)) else "",
    )
    return {CONFIG: config + pools, SCRIPT: parts.LUA, **map_files(routes)}


def map_files(routes: Routes) -> dict[str, str]:
    maps = {POOLS: routes.pools, HOMES: routes.homes}
    return {file: "".join(f"{tenant} {value}\n" for tenant, value in sorted(map.items())) for file, map in maps.items()}


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Writes each file under a temporary name first, so that HAProxy reads no half one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        temporary = folder / f"{name}.writing"
        temporary.write_text(content, "utf-8")
        temporary.replace(folder / name)


def check_folder(folder: Path) -> None:
    """Raises if HAProxy cannot use the folder."""
    path = str(folder.resolve())
    if not FOLDER.fullmatch(path):
        raise InvalidInput(f"{path} has a character that HAProxy reads in its own way: give --to a plain path")
    check_socket_path(Path(path, SOCKET), "--to", LONGEST_SOCKET)


def check_listening(listening: Listening) -> None:
    if not is_address(f"{listening.address}:{listening.port}"):
        raise InvalidInput(f"{listening.address}:{listening.port} is no address to listen on: give --address and --port")
    if not is_address(f"{listening.stats_address}:{listening.port}"):
        raise InvalidInput(f"--stats-address {listening.stats_address}: it is no address to listen on")
    if not 0 <= listening.stats_port <= LARGEST_PORT or listening.stats_port == listening.port:
        raise InvalidInput(f"--stats-port {listening.stats_port}: give another port than --port, or 0 for none")


def start_command(folder: Path) -> list[str]:
    """Returns the command that runs the router in the foreground. SIGUSR2 has it read its file again."""
    return [haproxy(), "-W", "-db", "-f", str(folder.resolve() / CONFIG)]


def check_file(folder: Path) -> None:
    """Raises if HAProxy does not take the file."""
    done = subprocess.run([haproxy(), "-c", "-q", "-f", folder / CONFIG], capture_output=True, text=True)
    if done.returncode:
        raise HplmError(f"HAProxy does not take {folder / CONFIG}: {done.stderr.strip()}")


def haproxy() -> str:
    return program("haproxy", "haproxy")


def _choice_by_model(cluster: ClusterDescription, probes: Mapping[str, Mapping[str, Probe]]) -> str:
    """Requests without a tenant, such as for metadata, go to the first pool that has the model."""
    lines: list[str] = []
    known = set(probes[cluster.pools[0].name])
    for pool in cluster.pools[1:]:
        own = sorted(set(probes[pool.name]) - known)
        known.update(own)
        if own:
            names = "|".join(re.escape(name) for name in own)
            asks_for_one = f"path_reg ^/v2/models/({names})(-[a-z]+)?(/|$)"
            lines.append(f"    http-request set-var(txn.pool) str({pool.name}) if !named {{ {asks_for_one} }}")
    return "".join(f"{line}\n" for line in lines)


def _backends(pool: Pool, probes: Mapping[str, Probe], routers: int) -> str:
    """Returns a backend for tenants without limits, and one for those that have homes; over HTTP and over gRPC."""
    name = pool.name
    checks = "".join(
        parts.CHECK.substitute(model=model, path=probe.path, body=_quoted(probe.body))
        for model, probe in sorted(probes.items())
    )
    servers = "".join(f"    server {one.name} {one.http} id {one.id}\n" for one in pool.replicas)
    resolved = parts.RESOLVED if _is_name(pool) else ""
    # The only server: one slow answer to a check must not close the door.
    fall = 2 if len(pool.replicas) > 1 else 3
    checked = parts.OVERFLOW + parts.CHECKED.substitute(checks=checks, fall=fall)
    main = {"name": name, "at_once": AT_ONCE // routers, "resolved": resolved}
    homes = {"name": f"{name}:homes", "at_once": LIMITED_AT_ONCE // routers, "resolved": resolved, "rules": _chosen(pool)}
    backends = [
        parts.HTTP.substitute(main, rules=checked, servers=servers),
        parts.GRPC.substitute(main, rules=parts.OVERFLOW, servers=_tracking(pool, "grpc")),
        parts.HTTP.substitute(homes, servers=_tracking(pool, "http")),
        parts.GRPC.substitute(homes, servers=_tracking(pool, "grpc")),
    ]
    for one in pool.replicas:
        home = _tracking_one(pool, one, "http")
        backends.append(parts.HOME.substitute(name=f"{name}:home:{one.id}", server=home, resolved=resolved))
    return "\n".join(backends)


def _chosen(pool: Pool) -> str:
    """Returns rules that choose the home. Without one, the hash of the tenant's name chooses."""
    return "".join(f"    use-server {one.name} if {{ var(txn.home) -m str {one.id} }}\n" for one in pool.replicas)


def _tracking(pool: Pool, protocol: str) -> str:
    return "".join(f"    server {_tracking_one(pool, one, protocol)}\n" for one in pool.replicas)


def _tracking_one(pool: Pool, replica: Replica, protocol: str) -> str:
    """Returns a server that takes its health from the pool's main backend."""
    return f"{replica.name} {getattr(replica, protocol)} id {replica.id} track {pool.name}/{replica.name}"


def _quoted(body: bytes) -> str:
    return "'" + json.dumps(json.loads(body), separators=(",", ":")).replace("'", "\\u0027") + "'"


def _is_name(pool: Pool) -> bool:
    """Whether a replica's address begins with a host name, which may mean another machine later."""
    return any(re.search("[A-Za-z]", host) for one in pool.replicas for host in (one.http, one.grpc) if host[0] != "[")
