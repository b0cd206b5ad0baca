"""Measures how many tenants a third replica takes from two, with the router and with stand-ins for replicas."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.measuring.cluster_material import Material, say
from hplm.cluster.router import start_command
from hplm.errors import HplmError
from hplm.placement.fields import write
from hplm.server.ports import LOOPBACK, listen

TENANTS = 1000
SECONDS = 30.0


def ring_figures(folder: Path, material: Material) -> dict[str, float]:
    say("tenants that a third replica takes")
    with ExitStack() as stack:
        addresses = [stack.enter_context(_stand_in(f"replica-{number}")) for number in (1, 2, 3)]
        two, three = (_places(folder / str(count), material, addresses[:count]) for count in (2, 3))
    moved = [tenant for tenant in two if two[tenant] != three[tenant]]
    strayed = [tenant for tenant in moved if three[tenant] != "replica-3"]  # from one old replica to the other
    return {"moved_share": round(len(moved) / len(two), 4), "strayed_share": round(len(strayed) / len(two), 4)}


def _places(folder: Path, material: Material, addresses: list[str]) -> dict[str, str]:
    """Returns the replica to which a router with so many of them sends each tenant."""
    folder.mkdir(parents=True)
    replicas = [
        {"id": number, "name": f"replica-{number}", "http": address, "grpc": address}
        for number, address in enumerate(addresses, 1)
    ]
    pool = {"name": "all", "repository": str(material.repository), "replicas": replicas}
    write(folder / "cluster.json", "hplm replicas", 1, {"pools": [pool]})
    with listen(LOOPBACK, 0, "") as free:
        port = free.getsockname()[1]
    route = [sys.executable, "-m", "hplm.cli.main", "route", "--cluster", str(folder / "cluster.json"), "--to", str(folder)]
    subprocess.run([*route, "--port", str(port), "--stats-port", "0"], check=True, stdout=subprocess.DEVNULL)
    with subprocess.Popen(start_command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as router:
        try:
            _until_all_answer(port, len(addresses), material.backbone)
            connection = http.client.HTTPConnection(LOOPBACK, port, timeout=SECONDS)
            tenants = [f"tenant-{number}" for number in range(TENANTS)]
            places = {tenant: _asked(connection, material.backbone, tenant) for tenant in tenants}
            if not all(places.values()):
                raise HplmError("the router has not sent every tenant to a stand-in: nothing was measured")
            return places
        finally:
            router.terminate()


def _asked(connection: http.client.HTTPConnection, backbone: str, tenant: str) -> str:
    connection.request(
        "POST", f"/v2/models/{backbone}/infer", b"{}", {"hplm-tenant": tenant, "Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    content = answer.read()
    return json.loads(content)["name"] if answer.status == 200 else ""


def _until_all_answer(port: int, count: int, backbone: str) -> None:
    until, seen = time.monotonic() + SECONDS, set[str]()
    while time.monotonic() < until:
        try:
            connection = http.client.HTTPConnection(LOOPBACK, port, timeout=SECONDS)
            seen |= {_asked(connection, backbone, f"first-{number}") for number in range(100)} - {""}
            if len(seen) == count:
                return
        except OSError:
            time.sleep(0.1)
    raise HplmError(f"the router reaches {len(seen)} of {count} stand-ins for replicas")


class Quiet(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """The router closes connections of checks as it likes."""


@contextmanager
def _stand_in(name: str) -> Generator[str]:
    """Serves answers with its name to all requests, also to those about its health. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps({"name": name}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with Quiet((LOOPBACK, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{LOOPBACK}:{server.server_address[1]}"
        server.shutdown()
