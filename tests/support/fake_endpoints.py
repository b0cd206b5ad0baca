"""Listens over HTTP and gRPC as Triton does. What is answered, subclasses say: `FakeServer` and the clients' `FakeTriton`."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc
from typing_extensions import Self

HOST = "127.0.0.1"
THREADS = 32  # of gRPC: requests that are held at once


class FakeEndpoints(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves until `close`, or while a `with` block runs. After `stop` its port of HTTP refuses connections until `start`."""

    def __init__(self, ports: tuple[int, int] = (0, 0)) -> None:
        """`ports`: of HTTP and gRPC."""
        self._address, self._server = (HOST, ports[0]), None
        self.start()
        self._threads = ThreadPoolExecutor(THREADS)
        self._grpc = grpc.server(self._threads, options=[("grpc.max_receive_message_length", -1)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._grpc)
        self.grpc_url = f"{HOST}:{self._grpc.add_insecure_port(f'{HOST}:{ports[1]}')}"
        self._grpc.start()

    def over_http(self, asked: Asked, body: bytes) -> None:
        """Answers a request over HTTP."""
        raise NotImplementedError

    @property
    def http_url(self) -> str:
        return "{}:{}".format(*self._address)

    def start(self) -> None:
        self._server = _Server(self._address, partial(Asked, self.over_http))
        self._address = self._address[0], self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Closes the port and all connections, as the end of a process does."""
        if self._server is not None:
            self._server.shutdown()
            self._server.close_all()
            self._server = None

    def close(self) -> None:
        self.stop()
        self._grpc.stop(None).wait()
        self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Asked(BaseHTTPRequestHandler):
    """A request over HTTP."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, answer: Any, *given: Any) -> None:
        self._answer = answer
        super().__init__(*given)

    def do_POST(self) -> None:
        self._answer(self, self.rfile.read(int(self.headers.get("content-length", 0))))

    do_GET = do_POST

    def say(self, status: int, head: Any, blobs: bytes = b"") -> None:
        """Answers in JSON, with tensors in binary behind it."""
        text = json.dumps(head).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text) + len(blobs)))
        if blobs:
            self.send_header("inference-header-content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text + blobs)

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 256

    def __init__(self, *given: Any) -> None:
        self._open: set[Any] = set()
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of a connection that `close_all` or its client has closed."""

    def close_all(self) -> None:
        self.server_close()
        for request in list(self._open):
            self.shutdown_request(request)
