"""Writes the file of a HAProxy before one to N replicas: the router, or with TLS and limits the front door."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from hplm.cluster.description import Replica, Replicas, is_address
from hplm.errors import RESEND, HplmError, InvalidInput
from hplm.server.probing import Probe, probe_of
from hplm.server.process import program
from hplm.server.repository import model_names
from hplm.tenants.authorize import HEADER, UNSEEN
from hplm.tenants.snapshot import NAME
from hplm.tenants.state_folder import EXPORTED_TENANTS

TEMPLATE = "haproxy.cfg.j2"
CONFIG, SOCKET, SCRIPT = "haproxy.cfg", "haproxy.sock", "haproxy.lua"
LONGEST_SOCKET = 93  # bytes of a path: HAProxy first makes the socket under a longer name
FOLDER = re.compile(r"[A-Za-z0-9/._+@=-]+")  # of which HAProxy reads no character as its own
# Requests of each replica over HTTP at a time, from all routers: of more than 277 Triton may lose answers (docs/triton.md).
AT_ONCE = 256
READ_BYTES = 50_000  # of a body that is searched for the tenant as a whole; HAProxy's buffer holds a little more
ALIAS = "hplm"
NO_STATS = "none"
TABLES = {
    **dict.fromkeys(("few_of_address", "more_of_address", "large_addresses", "medium_addresses"), "ipv6"),
    "tenants_in_flight": "string len 64",
}
_TEXT = {"data_type": "TYPE_STRING", "dims": [1]}
ENCODER: dict[str, Any] = {"max_batch_size": 1, "input": [{"name": "TEXT", **_TEXT}]}
DECODER: dict[str, Any] = {"model_transaction_policy": {"decoupled": True}, "input": [{"name": "text_input", **_TEXT}]}


@dataclass(frozen=True)
class Listening:
    """Where the router listens. HTTP and gRPC share the port."""

    address: str = "127.0.0.1"
    port: int = 8000
    stats: str = NO_STATS  # HOST:PORT

    def __post_init__(self) -> None:
        if not is_address(f"{self.address}:{self.port}"):
            raise InvalidInput(f"{self.address}:{self.port} is no address to listen on: give --address and --port")
        if self.stats != NO_STATS and not is_address(self.stats):
            raise InvalidInput(f"--stats {self.stats}: it is no address to listen on: give HOST:PORT, or {NO_STATS}")
        if self.stats.rpartition(":")[2] == str(self.port):
            raise InvalidInput(f"--stats {self.stats}: give another port than --port")


class One(NamedTuple):
    """The only server of the default door, whose addresses are variables."""

    id: int = 1
    name: str = "one"
    http: str = '"${HPLM_HTTP}"'
    grpc: str = '"${HPLM_GRPC}"'
    has_name: bool = False


def router(described: Replicas, probes: Mapping[str, Probe], folder: Path, listening: Listening, routers: int = 1) -> str:
    """Returns the router's file. `routers`: how many such routers divide what each replica may get."""
    if not 1 <= routers <= AT_ONCE:
        raise InvalidInput(f"--routers {routers}: give 1 to {AT_ONCE}")
    bind = f"{listening.address}:{listening.port}"
    stats = "" if listening.stats == NO_STATS else listening.stats
    own = {"door": False, "bind": bind, "stats": stats, "most": AT_ONCE // routers}
    return _rendered(described.replicas, probes, folder, spread=described.spread, **own)


def door(described: Replicas, probes: Mapping[str, Probe], folder: Path) -> str:
    """Returns the front door's file, whose settings are variables of the environment."""
    backbones = " ".join(sorted(probes.keys() - {ALIAS}))
    return _rendered(described.replicas, probes, folder, spread=described.spread, door=True, backbones=backbones)


def default_door() -> str:
    """Returns the file of a front door before one server, which deploy/haproxy has."""
    return _rendered([One()], {"${HPLM_PROBED}": probe_of(ENCODER)}, None, spread=(), door=True, backbones="minilm")


def _rendered(replicas: Sequence[Replica | One], probes: Mapping[str, Probe], folder: Path | None, **given: object) -> str:
    text = Path(__file__).with_name(TEMPLATE).read_text("utf-8")
    environment = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    facts: dict[str, object] = {"header": HEADER, "unseen": UNSEEN, "resend": RESEND, "name": NAME.pattern}
    facts |= {"read_bytes": READ_BYTES, "script": SCRIPT, "socket": SOCKET, "quoted": _quoted, "tables": list(TABLES.items())}
    facts["by_name"] = any(one.has_name for one in replicas)
    where = folder.resolve() if folder is not None else ""
    return environment.from_string(text).render(replicas=replicas, probes=probes, folder=where, **facts, **given)


def probes_of(repository: Path) -> dict[str, Probe]:
    """Returns the probe of each backbone, and of the model that finds the backbones of tenants."""
    models = model_names(repository)
    backbones = [model for model in models if (repository / model / "1" / EXPORTED_TENANTS).is_file()]
    if not backbones:
        raise InvalidInput(f"{repository} contains no backbone: export one with `hplm export`")
    public = backbones + [ALIAS] * (ALIAS in models)
    configs = {model: (repository / model / "config.pbtxt").read_text("utf-8") for model in public}
    return {model: probe_of(DECODER if "decoupled: true" in config else ENCODER) for model, config in configs.items()}


def write_files(config: str, folder: Path) -> None:
    """Writes each file under a temporary name first, so that HAProxy reads no half one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {CONFIG: config, SCRIPT: Path(__file__).with_name(SCRIPT).read_text("utf-8")}.items():
        temporary = folder / f"{name}.writing"
        temporary.write_text(content, "utf-8")
        temporary.replace(folder / name)


def check_folder(folder: Path) -> None:
    """Raises if HAProxy cannot use the folder."""
    path = str(folder.resolve())
    if not FOLDER.fullmatch(path):
        raise InvalidInput(f"{path} has a character that HAProxy reads in its own way: give --to a plain path")
    if len(path) + 1 + len(SOCKET) > LONGEST_SOCKET:
        raise InvalidInput(f"{path} is too long for a socket in it ({LONGEST_SOCKET} bytes at most): give --to a shorter path")


def start_command(folder: Path) -> list[str]:
    """Returns the command that runs HAProxy in the foreground. SIGUSR2 has it read its file again."""
    return [haproxy(), "-W", "-db", "-f", str(folder.resolve() / CONFIG)]


def check_file(folder: Path) -> None:
    """Raises if HAProxy does not take the file."""
    done = subprocess.run([haproxy(), "-c", "-q", "-f", folder / CONFIG], capture_output=True, text=True)
    if done.returncode:
        raise HplmError(f"HAProxy does not take {folder / CONFIG}: {done.stderr.strip()}")


def haproxy() -> str:
    return program("haproxy", "haproxy")


def _quoted(body: bytes) -> str:
    return "'" + json.dumps(json.loads(body), separators=(",", ":")).replace("'", "\\u0027") + "'"


if __name__ == "__main__":  # after a change of the template
    Path(__file__).parents[2].joinpath("deploy/haproxy", CONFIG).write_text(default_door(), "utf-8")
