"""Stand-ins for replicas, which compute nothing, behind the real router."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.measuring.cluster_material import Material
from hplm.cluster.router import CONFIG, start_command
from hplm.errors import HplmError
from hplm.placement.fields import write
from hplm.server.ports import LOOPBACK, listen

SECONDS = 30.0


class StandIn:
    """Answers with its name, also to questions about its health. Serves tenants one after the other, as an engine does."""

    def __init__(self, name: str, slots: int = 0, work_s: float = 0.0) -> None:
        """`slots`: of adapters, the least recently used one is replaced. `work_s`: how long each request takes."""
        self.name = name
        self.tenants: Counter[str] = Counter()  # requests of each
        self.brought = 0  # requests whose adapter was in no slot
        self._slots, self._work_s = slots, work_s
        self._held: OrderedDict[str, None] = OrderedDict()
        self._engine = threading.Lock()

    def take(self, tenant: str) -> None:
        with self._engine:
            self.tenants[tenant] += 1
            if tenant not in self._held:
                self.brought += 1
            self._held[tenant] = None
            self._held.move_to_end(tenant)
            if len(self._held) > self._slots:
                self._held.popitem(last=False)
            if self._work_s:
                time.sleep(self._work_s)

    @contextmanager
    def serving(self) -> Generator[str]:
        """Yields its address."""
        with _Quiet((LOOPBACK, 0), _handler(self)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield f"{LOOPBACK}:{server.server_address[1]}"
            finally:
                server.shutdown()


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """The router closes connections of checks as it likes."""


def _handler(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    body = json.dumps({"name": stand_in.name}).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if tenant := self.headers.get("hplm-tenant"):  # not in questions about health
                stand_in.take(tenant)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler


@contextmanager
def routed(
    folder: Path, material: Material, replicas: Sequence[StandIn], change: Callable[[str], str] = lambda config: config
) -> Generator[int]:
    """Runs a router before the replicas, with a changed file of HAProxy. Yields its port when it reaches all of them."""
    folder.mkdir(parents=True)
    with ExitStack() as ending:
        addresses = [ending.enter_context(one.serving()) for one in replicas]
        described = [
            {"id": number, "name": one.name, "http": address, "grpc": address}
            for number, (one, address) in enumerate(zip(replicas, addresses, strict=True), 1)
        ]
        pool = {"name": "all", "repository": str(material.repository), "replicas": described}
        write(folder / "cluster.json", "hplm replicas", 1, {"pools": [pool]})
        with listen(LOOPBACK, 0, "") as free:
            port = free.getsockname()[1]
        route = [sys.executable, "-m", "hplm.cli.main", "route", "--cluster", str(folder / "cluster.json"), "--to", str(folder)]
        subprocess.run([*route, "--port", str(port), "--stats-port", "0"], check=True, stdout=subprocess.DEVNULL)
        config = folder / CONFIG
        config.write_text(change(config.read_text("utf-8")), "utf-8")
        with subprocess.Popen(start_command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as router:
            try:
                _until_all_answer(port, len(replicas), material.backbone)
                yield port
            finally:
                router.terminate()


def places(port: int, backbone: str, tenants: Sequence[str]) -> dict[str, str]:
    """Returns the replica to which the router sends each tenant while there is no other load."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=SECONDS)
    found = {tenant: _asked(connection, backbone, tenant) for tenant in tenants}
    if not all(found.values()):
        raise HplmError("the router has not sent every tenant to a stand-in: nothing was measured")
    return found


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
