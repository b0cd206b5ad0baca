"""A fake of Triton behind a router or a door, over HTTP and gRPC. It holds requests until it may answer them."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.wait import PATIENCE

HOST = "127.0.0.1"
PROBED = b'"hplm_probe":true'
THREADS = 32  # of gRPC: requests that are held at once


class FakeServer:
    """Serves until `close`. After `stop` its port of HTTP refuses connections until `start`."""

    def __init__(self, name: str, host: str = HOST, larger_than: int = -1, ports: tuple[int, int] = (0, 0)) -> None:
        """Only requests of more than so many bytes are counted and held. `ports`: of HTTP and gRPC."""
        self.name = name
        self.tenants: Counter[str | None] = Counter()  # by the header that arrived
        self.headers: deque[dict[str, str]] = deque(maxlen=10)  # of the last requests, or their metadata
        self.refusal = ""  # what all requests but probes are answered
        self.drains = False  # probes get 503
        self.probed: set[str] = set()  # paths
        self.dead: set[str] = set()  # models whose probes fail
        self.sizes: list[int] = []  # in the order of arrival
        self.count = 0  # requests that it holds
        self._host, self._larger_than, self._port = host, larger_than, ports[0]
        self._changed = threading.Condition()
        self._may_answer, self._answered = True, 0
        self._reached = threading.Event()
        self._reached.set()
        self._server: _Server | None = None
        self.start()
        self._grpc = grpc.server(ThreadPoolExecutor(THREADS))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(self), self._grpc)
        self.grpc = f"{host}:{self._grpc.add_insecure_port(f'{host}:{ports[1]}')}"
        self._grpc.start()

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

    def cut(self) -> None:
        """Is as good as cut off by the network over HTTP: nobody is told or answered, and connections stay open."""
        self._reached.clear()

    def mend(self) -> None:
        self._reached.set()

    def close(self) -> None:
        self.mend()
        self.release()
        if self._server is not None:
            self.stop()
        self._grpc.stop(None)

    def hold(self) -> None:
        """Holds requests from now on, and forgets those before."""
        with self._changed:
            self.sizes.clear()
            self._may_answer, self._answered = False, 0

    def release(self) -> None:
        with self._changed:
            self._may_answer = True
            self._changed.notify_all()

    def answer_first(self) -> None:
        with self._changed:
            self._answered += 1
            self._changed.notify_all()

    def take(self, headers: dict[str, str], size: int) -> None:
        with self._changed:
            self.headers.append(headers)
            self.tenants[headers.get("hplm-tenant")] += 1
            if size > self._larger_than:
                self.count += 1
                self.sizes.append(size)
                mine = len(self.sizes)
                self._changed.wait_for(lambda: self._may_answer or mine <= self._answered, PATIENCE)
                self.count -= 1

    def answer_to(self, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        assert self._reached.wait(PATIENCE)
        if PROBED in body:
            self.probed.add(path)
            is_dead = self.drains or path.split("/")[3] in self.dead
            return (503, {"error": "[draining] the server is being stopped"}) if is_dead else (200, {})
        self.take({name.lower(): value for name, value in headers.items()}, len(body))
        if self.refusal:
            return 503, {"error": self.refusal}
        return 200, {"replica": self.name, "path": path, "bytes": len(body)}


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, fake: FakeServer) -> None:
        self._fake = fake

    def ModelInfer(self, request, context):
        self._fake.take(dict(context.invocation_metadata()), request.ByteSize())
        if self._fake.refusal:
            context.abort(grpc.StatusCode.UNAVAILABLE, self._fake.refusal)
        return service_pb2.ModelInferResponse(model_name=self._fake.name)

    def ModelStreamInfer(self, request_iterator, context):
        self._fake.take(dict(context.invocation_metadata()), 0)
        answer = service_pb2.ModelInferResponse(model_name=self._fake.name)
        for _ in request_iterator:
            yield service_pb2.ModelStreamInferResponse(infer_response=answer)


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
        pass  # a connection that `close_all` or its client has closed

    def close_all(self) -> None:
        self.server_close()
        for request in list(self._open):
            self.shutdown_request(request)


def _handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            status, said = fake.answer_to(self.path, self.headers, self.rfile.read(int(self.headers.get("Content-Length", 0))))
            answer = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    return Handler
