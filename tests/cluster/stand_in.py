"""Stand-ins for the replicas of a cluster: HTTP servers that say their name, and what they were sent."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.wait import PATIENCE

HOST = "127.0.0.1"
PROBED = b'"hplm_probe":true'


class StandIn:
    """Serves until `close`. After `stop` its port refuses connections until `start`."""

    def __init__(self, name: str, host: str = HOST) -> None:
        self.name = name
        self._host = host
        self.tenants: Counter[str | None] = Counter()  # by the header that arrived
        self.drains = False  # probes get 503
        self.says: tuple[int, bytes] | None = None  # to every request that is no probe
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.probed: set[str] = set()  # paths
        self.dead: set[str] = set()  # models whose probes fail
        self._lock = threading.Lock()
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()
        self._grpc, self.grpc = _grpc_stand_in(self, host)

    @property
    def http(self) -> str:
        return f"{self._host}:{self._port}"

    def start(self) -> None:
        self._server = _Server((self._host, self._port), _handler(self))
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Closes the port and all connections, as the end of a process does."""
        assert self._server is not None
        self._server.shutdown()
        self._server.close_all()
        self._server = None

    def close(self) -> None:
        self.may_answer.set()
        if self._server is not None:
            self.stop()
        self._grpc.stop(None)

    def take(self, tenant: str | None) -> None:
        with self._lock:
            self.tenants[tenant] += 1
        self.may_answer.wait(PATIENCE)

    def answer_to(self, path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        if PROBED in body:
            self.probed.add(path)
            is_dead = self.drains or path.split("/")[3] in self.dead
            return (503, b'{"error":"[draining] the server is being stopped"}') if is_dead else (200, b"{}")
        self.take(headers.get("hplm-tenant"))
        return self.says or (200, json.dumps({"replica": self.name, "path": path, "bytes": len(body)}).encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *arguments: Any) -> None:
        self._open: set[Any] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a connection that `close_all` has closed

    def close_all(self) -> None:
        self.server_close()
        for request in list(self._open):
            self.shutdown_request(request)


def _handler(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            self._send(self.rfile.read(int(self.headers["Content-Length"])))

        def do_GET(self) -> None:
            self._send(b"")

        def _send(self, body: bytes) -> None:
            status, said = stand_in.answer_to(self.path, self.headers, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _grpc_stand_in(stand_in: StandIn, host: str) -> tuple[grpc.Server, str]:
    from concurrent.futures import ThreadPoolExecutor

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ModelInfer(self, request, context):
            stand_in.take(dict(context.invocation_metadata()).get("hplm-tenant"))
            return service_pb2.ModelInferResponse(model_name=stand_in.name)

        def ModelStreamInfer(self, requests, context):
            stand_in.take(dict(context.invocation_metadata()).get("hplm-tenant"))
            for _ in requests:
                yield service_pb2.ModelStreamInferResponse(
                    infer_response=service_pb2.ModelInferResponse(model_name=stand_in.name)
                )

    server = grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    return server, f"{host}:{port}"
