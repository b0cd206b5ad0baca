"""The front door of deploy/haproxy as its operator starts it, on a free port of this machine: a real HAProxy."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import HplmError

CONFIG = Path(__file__).parents[1] / "deploy" / "haproxy" / "haproxy.cfg"
HOST = "127.0.0.1"
_PATIENCE = 30.0  # seconds to start and to end
_BEFORE_OTHERS = ("chrt", "--rr", "1")  # as deploy/README.md says for a door beside a server; only root may


@dataclass(frozen=True)
class Door:
    port: int
    certificate: Path  # for 127.0.0.1 and localhost
    log: Path
    pid: int


def missing_programs() -> list[str]:
    """Returns which of the programs that a door needs are not installed here."""
    return [program for program in ("haproxy", "openssl") if _found(program) is None]


@contextmanager
def front_door(folder: Path, http_url: str, grpc_url: str, backbones: str, **settings: object) -> Iterator[Door]:
    """Starts a door that writes its log and certificate into the folder. `settings`: variables of its configuration."""
    missing = " and ".join(missing_programs())
    if missing:
        raise HplmError(f"{missing}: not found on PATH; install it (Debian, Ubuntu: apt-get install haproxy openssl)")
    folder.mkdir(exist_ok=True)
    certificate, pair = make_certificate(folder)
    kept, log = _keep_port(), folder / "log"
    port = kept.getsockname()[1]
    environment = {
        **os.environ,
        "HPLM_DOOR": f"{HOST}:{port}",
        "HPLM_CERTIFICATE": str(pair),
        "HPLM_HTTP": http_url,
        "HPLM_GRPC": grpc_url,
        "HPLM_BACKBONES": backbones,
        "HPLM_PROBED": backbones.split()[0],
        "HPLM_DOOR_LUA": str(CONFIG.parent / "door.lua"),
        **{name: str(value) for name, value in settings.items()},
    }
    before_others = _BEFORE_OTHERS if _may_go_before_others() else ()
    command = [*before_others, str(_found("haproxy")), "-db", "-f", str(CONFIG)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    door = Door(port, certificate, log, process.pid)
    try:
        _wait_until_open(door, process)
        yield door
    finally:
        process.terminate()
        process.wait(_PATIENCE)
        kept.close()


def _found(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")  # Debian's users do not have it


def _may_go_before_others() -> bool:
    """Whether the system lets this user start a process that gets a core before all others."""
    return _found("chrt") is not None and not subprocess.run([*_BEFORE_OTHERS, "true"], capture_output=True).returncode


def _keep_port() -> socket.socket:
    """Binds any free port, so that nobody else gets it. HAProxy shares it: connections go to the socket that listens."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept.bind((HOST, 0))
    return kept


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Returns the files of a new certificate, and of the same with its key."""
    certificate, key, pair = folder / "certificate.pem", folder / "key.pem", folder / "pair.pem"
    names = f"subjectAltName=DNS:localhost,IP:{HOST}"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext {names}"
    subprocess.run(["openssl", *words.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    pair.write_bytes(certificate.read_bytes() + key.read_bytes())
    return certificate, pair


def _wait_until_open(door: Door, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection((HOST, door.port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.05)
    raise HplmError(f"haproxy does not start: {door.log.read_text(errors='replace').strip()}")
