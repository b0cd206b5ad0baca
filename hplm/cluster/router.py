"""Writes the files of the router: a stock HAProxy that sends each tenant's requests to the replica that has its adapter."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hplm.cluster import haproxy_config as parts
from hplm.cluster.description import LARGEST_PORT, ClusterDescription, Pool, is_address
from hplm.cluster.routes import Routes
from hplm.errors import HplmError, InvalidInput
from hplm.server.probing import Probe
from hplm.tenants.authorize import HEADER, UNSEEN
from hplm.tenants.snapshot import NAME

CONFIG, SOCKET, SCRIPT, POOLS, HOMES = "haproxy.cfg", "haproxy.sock", "tenant.lua", "pools.map", "homes.map"
LONGEST_SOCKET = 93  # bytes of a path: HAProxy first makes the socket under a longer name
FOLDER = re.compile(r"[A-Za-z0-9/._+@=-]+")  # of which HAProxy reads no character as its own
# Requests of each replica over HTTP at a time: of more than 277 together Triton may lose answers (docs/triton.md).
AT_ONCE, LIMITED_AT_ONCE = 160, 96
READ_BYTES = 50_000  # of a body that is searched for the tenant as a whole; HAProxy's buffer holds a little more


@dataclass(frozen=True)
class Listening:
    """Where the router listens. HTTP and gRPC share the port."""

    address: str = "127.0.0.1"
    port: int = 8000
    stats_port: int = 8404  # on loopback; 0: none


def router_files(
    cluster: ClusterDescription, probes: Mapping[str, Mapping[str, Probe]], routes: Routes, folder: Path, listening: Listening
) -> dict[str, str]:
    """Returns the content of each file by its name. `probes`: those of each pool's models."""
    check_folder(folder)
    check_listening(listening)
    pools = "\n".join(_backends(pool, probes[pool.name]) for pool in cluster.pools)
    config = parts.HEAD.substitute(
        folder=folder.resolve(),
        bind=f"{listening.address}:{listening.port}",
        header=HEADER,
        unseen=UNSEEN,
        name=NAME.pattern,
        first=cluster.pools[0].name,
        others=_choice_by_model(cluster, probes),
        homes=_choice_of_home(max(len(pool.replicas) for pool in cluster.pools)),
        read_bytes=READ_BYTES,
        stats=parts.STATS.substitute(port=listening.stats_port) if listening.stats_port else "",
        resolvers=parts.RESOLVERS if _has_names(cluster) else "",
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
    if len(f"{path}/{SOCKET}") > LONGEST_SOCKET:
        raise InvalidInput(
            f"{path}/{SOCKET} is too long for a socket ({LONGEST_SOCKET} bytes at most): give --to a shorter path"
        )


def check_listening(listening: Listening) -> None:
    if not is_address(f"{listening.address}:{listening.port}"):
        raise InvalidInput(f"{listening.address}:{listening.port} is no address to listen on: give --address and --port")
    if not 0 <= listening.stats_port <= LARGEST_PORT or listening.stats_port == listening.port:
        raise InvalidInput(f"--stats-port {listening.stats_port}: give another port than --port, or 0 for none")


def start_command(folder: Path) -> list[str]:
    """Returns the command that runs the router in the foreground. SIGUSR2 has it read its file again."""
    return [str(haproxy()), "-W", "-db", "-f", str(folder.resolve() / CONFIG)]


def check_file(folder: Path) -> None:
    """Raises if HAProxy does not take the file."""
    done = subprocess.run([haproxy(), "-c", "-q", "-f", folder / CONFIG], capture_output=True, text=True)
    if done.returncode:
        raise HplmError(f"HAProxy does not take {folder / CONFIG}: {done.stderr.strip()}")


def haproxy() -> Path:
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")  # Debian's users do not have that
    if found is None:
        raise HplmError("haproxy: not found on PATH; install it (Debian, Ubuntu: apt-get install haproxy)")
    return Path(found)


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


def _choice_of_home(most: int) -> str:
    """A tenant with several homes goes to one of them at random."""
    return "".join(
        f"    http-request set-var(txn.home) var(txn.homes),field({turn + 2},/) if limited {{ var(txn.turn) -m int {turn} }}\n"
        for turn in range(most)
    )


def _backends(pool: Pool, probes: Mapping[str, Probe]) -> str:
    """Returns a backend for tenants without limits, and one for the tenants of each home; over HTTP and over gRPC."""
    name = pool.name
    checks = "".join(
        parts.CHECK.substitute(model=model, path=probe.path, body=_quoted(probe.body))
        for model, probe in sorted(probes.items())
    )
    servers = "".join(f"    server {one.name} {one.http} id {one.id}\n" for one in pool.replicas)
    resolved = parts.RESOLVED if _is_name(pool) else ""
    # The only server: one slow answer to a check must not close the door.
    fall = 2 if len(pool.replicas) > 1 else 3
    backends = [parts.MAIN.substitute(name=name, checks=checks, fall=fall, at_once=AT_ONCE, resolved=resolved, servers=servers)]
    backends.append(parts.MAIN_GRPC.substitute(name=name, resolved=resolved, servers=_tracking(pool, "grpc")))
    for home in pool.replicas:
        own = {"name": f"{name}:home:{home.id}", "resolved": resolved}
        backends.append(parts.HOME.substitute(own, at_once=LIMITED_AT_ONCE, servers=_tracking(pool, "http", home.id)))
        backends.append(parts.HOME_GRPC.substitute(own, servers=_tracking(pool, "grpc", home.id)))
    return "\n".join(backends)


def _tracking(pool: Pool, protocol: str, home: int | None = None) -> str:
    """Returns servers that take their health from the pool's main backend. All but the home are for its failure."""
    lines: list[str] = []
    for one in pool.replicas:
        backup = " backup" if home not in (None, one.id) else ""
        lines.append(f"    server {one.name} {getattr(one, protocol)} id {one.id} track {pool.name}/{one.name}{backup}\n")
    return "".join(lines)


def _quoted(body: bytes) -> str:
    return "'" + json.dumps(json.loads(body), separators=(",", ":")).replace("'", "\\u0027") + "'"


def _has_names(cluster: ClusterDescription) -> bool:
    return any(map(_is_name, cluster.pools))


def _is_name(pool: Pool) -> bool:
    """Whether a replica's address begins with a host name, which may mean another machine later."""
    return any(re.search("[A-Za-z]", host) for one in pool.replicas for host in (one.http, one.grpc) if host[0] != "[")
