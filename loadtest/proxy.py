"""The reverse proxy of deploy/haproxy as its operator starts it, on a free port of this machine: a real HAProxy."""

from __future__ import annotations

import csv
import datetime
import ipaddress
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hplm.server.ports import listens
from hplm.server.process import Process, program

CONFIG = Path(__file__).parents[1] / "deploy" / "haproxy" / "haproxy.cfg"
HOST = "127.0.0.1"
PATIENCE_S = 30.0  # to start and to end
SERVER = "2"  # a type of statistics
REAL_TIME = ("chrt", "--rr", "1")  # as deploy/README.md says for a proxy beside a server; only root may


@dataclass(frozen=True)
class Proxy:
    port: int
    certificate: Path  # for 127.0.0.1 and localhost
    log: Path


class AdminSocket:
    """Commands to a running HAProxy, and what it counts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(self._path))
            connection.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def answers(self) -> bool:
        """Whether HAProxy has made its socket, which may come later than its port."""
        try:
            return "Pid: " in self.ask("show info")
        except OSError:
            return False

    def servers(self, backend: str = "http") -> dict[str, dict[str, str]]:
        """Returns what HAProxy counts for each server of a backend."""
        return {row["svname"]: row for row in self.statistics() if row["pxname"] == backend and row["type"] == SERVER}

    def statistics(self) -> list[dict[str, str]]:
        """Returns what HAProxy counts for each frontend, backend and server."""
        return list(csv.DictReader(self.ask("show stat").strip().removeprefix("# ").splitlines()))


@contextmanager
def reverse_proxy(
    folder: Path, http_url: str, grpc_url: str, backbones: str, config: Path = CONFIG, **settings: object
) -> Iterator[Proxy]:
    """Starts a proxy that writes its log and certificate into the folder. `settings`: variables of its configuration."""
    haproxy = program("haproxy", "haproxy")
    folder.mkdir(exist_ok=True)
    certificate, pair = make_certificate(folder)
    # The port stays bound, so that nobody else gets it. HAProxy shares it: connections go to the socket that listens.
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((HOST, 0))
        port = kept.getsockname()[1]
        environment = {
            "HPLM_DOOR": f"{HOST}:{port}",
            "HPLM_CERTIFICATE": pair,
            "HPLM_HTTP": http_url,
            "HPLM_GRPC": grpc_url,
            "HPLM_BACKBONES": backbones,
            "HPLM_PROBED": backbones.split()[0],
            "HPLM_DOOR_LUA": CONFIG.parent / "door.lua",
            **settings,
        }
        may = shutil.which("chrt") and not subprocess.run([*REAL_TIME, "true"], capture_output=True).returncode
        command = [*(REAL_TIME if may else ()), haproxy, "-db", "-f", str(config)]
        process = Process(
            "haproxy", ["env", *(f"{name}={value}" for name, value in environment.items()), *command], folder / "log"
        )
        process.start()
        try:
            process.wait_until(lambda: listens(port), PATIENCE_S)
            yield Proxy(port, certificate, folder / "log")
        finally:
            process.stop(PATIENCE_S)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Returns the files of a new certificate, and of the same with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))])
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, pair = folder / "certificate.pem", folder / "pair.pem"
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    pair.write_bytes(certificate.read_bytes() + key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    return certificate, pair
