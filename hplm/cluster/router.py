"""Writes the files of the router: a stock HAProxy that sends each tenant's requests to the replica that has its adapter."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from hplm.cluster.admin_socket import check_socket_path
from hplm.cluster.description import LARGEST_PORT, Pool, is_address
from hplm.cluster.routes import Routes
from hplm.errors import HplmError, InvalidInput
from hplm.server.probing import Probe, probe_of
from hplm.server.process import program
from hplm.server.repository import model_names
from hplm.tenants.authorize import HEADER, UNSEEN
from hplm.tenants.snapshot import NAME
from hplm.tenants.state import EXPORTED_TENANTS

TEMPLATE = "haproxy.cfg.j2"
CONFIG, SOCKET, SCRIPT, POOLS, HOMES = "haproxy.cfg", "haproxy.sock", "tenant.lua", "pools.map", "homes.map"
LONGEST_SOCKET = 93  # bytes of a path: HAProxy first makes the socket under a longer name
FOLDER = re.compile(r"[A-Za-z0-9/._+@=-]+")  # of which HAProxy reads no character as its own
# Requests of each replica over HTTP at a time, from all routers: of more than 277 together Triton may lose answers
# (docs/triton.md).
AT_ONCE, LIMITED_AT_ONCE = 160, 96
READ_BYTES = 50_000  # of a body that is searched for the tenant as a whole; HAProxy's buffer holds a little more
ALIAS = "hplm"
_TEXT = {"data_type": "TYPE_STRING", "dims": [1]}
_ENCODER: dict[str, Any] = {"max_batch_size": 1, "input": [{"name": "TEXT", **_TEXT}]}
_DECODER: dict[str, Any] = {"model_transaction_policy": {"decoupled": True}, "input": [{"name": "text_input", **_TEXT}]}


@dataclass(frozen=True)
class Listening:
    """Where the router listens. HTTP and gRPC share the port."""

    address: str = "127.0.0.1"
    port: int = 8000
    stats_port: int = 8404  # 0: none
    stats_address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if not is_address(f"{self.address}:{self.port}"):
            raise InvalidInput(f"{self.address}:{self.port} is no address to listen on: give --address and --port")
        if not is_address(f"{self.stats_address}:{self.port}"):
            raise InvalidInput(f"--stats-address {self.stats_address}: it is no address to listen on")
        if not 0 <= self.stats_port <= LARGEST_PORT or self.stats_port == self.port:
            raise InvalidInput(f"--stats-port {self.stats_port}: give another port than --port, or 0 for none")


def router_files(
    pools: Sequence[Pool],
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
    text = Path(__file__).with_name(TEMPLATE).read_text("utf-8")
    environment = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    config = environment.from_string(text).render(
        folder=folder.resolve(),
        bind=f"{listening.address}:{listening.port}",
        stats=f"{listening.stats_address}:{listening.stats_port}" if listening.stats_port else "",
        header=HEADER,
        unseen=UNSEEN,
        name=NAME.pattern,
        read_bytes=READ_BYTES,
        pools=pools,
        others=_choice_by_model(pools, probes),
        by_name=[pool.name for pool in pools if _is_name(pool)],
        probes=probes,
        quoted=_quoted,
        most=AT_ONCE // routers,
        most_of_homes=LIMITED_AT_ONCE // routers,
    )
    return {CONFIG: config, SCRIPT: Path(__file__).with_name(SCRIPT).read_text("utf-8"), **map_files(routes)}


def probes_of(repository: Path) -> dict[str, Probe]:
    """Returns the probe of each backbone, and of the model that finds the backbones of tenants."""
    models = model_names(repository)
    backbones = [model for model in models if (repository / model / "1" / EXPORTED_TENANTS).is_file()]
    if not backbones:
        raise InvalidInput(f"{repository} contains no backbone: export one with `hplm export`")
    public = backbones + [ALIAS] * (ALIAS in models)
    configs = {model: (repository / model / "config.pbtxt").read_text("utf-8") for model in public}
    return {model: probe_of(_DECODER if "decoupled: true" in config else _ENCODER) for model, config in configs.items()}


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


def _choice_by_model(pools: Sequence[Pool], probes: Mapping[str, Mapping[str, Probe]]) -> list[tuple[str, str]]:
    """Returns the pools that have models which none before them has, and a pattern of these: for requests without a tenant."""
    found: list[tuple[str, str]] = []
    known = set(probes[pools[0].name])
    for pool in pools[1:]:
        if own := sorted(set(probes[pool.name]) - known):
            found.append((pool.name, "|".join(map(re.escape, own))))
        known.update(own)
    return found


def _quoted(body: bytes) -> str:
    return "'" + json.dumps(json.loads(body), separators=(",", ":")).replace("'", "\\u0027") + "'"


def _is_name(pool: Pool) -> bool:
    """Whether a replica's address begins with a host name, which may mean another machine later."""
    return any(re.search("[A-Za-z]", host) for one in pool.replicas for host in (one.http, one.grpc) if host[0] != "[")
