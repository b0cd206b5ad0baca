"""Stand-ins for Triton behind the front door, over HTTP and gRPC. They hold requests until the test lets them answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hplm.server.probing import PROBE
from tests.support.wait import eventually

THREADS = 32  # of gRPC: requests that are held at once


class Held:
    """The requests of more than so many bytes that the stand-ins have and do not answer yet."""

    def __init__(self, larger_than: int) -> None:
        self.count = 0
        self.sizes: list[int] = []  # in the order of arrival
        self.may_answer = threading.Event()
        self.refusal = ""  # what all but the door's own requests are answered
        self._first: list[threading.Event] = []  # of those that are held, in the same order
        self._larger_than = larger_than
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Forgets the requests of the test before, and holds those of this one."""
        self.sizes.clear(), self._first.clear()
        self.refusal = ""
        self.may_answer.clear()

    def take(self, size: int) -> None:
        if size > self._larger_than:
            with self._lock:
                self.count += 1
                self.sizes.append(size)
                mine = threading.Event()
                self._first.append(mine)
            eventually(lambda: mine.is_set() or self.may_answer.is_set())
            with self._lock:
                self.count -= 1

    def answer_first(self) -> None:
        with self._lock:
            self._first.pop(0).set()


@contextmanager
def http_stand_in(held: Held) -> Iterator[str]:
    """Yields its address."""

    class StandIn(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            held.take(len(body))
            refusal = "" if PROBE.encode() in body else held.refusal
            answer = json.dumps({"error": refusal} if refusal else {}).encode()
            self.send_response(503 if refusal else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.handle_error = lambda *_: None  # of a client that has gone: it would be written into another test's output
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    held.may_answer.set()
    server.shutdown()
    server.server_close()


@contextmanager
def grpc_stand_in(held: Held) -> Iterator[str]:
    """Yields its address."""

    class StandIn(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ModelInfer(self, request, context):
            held.take(request.ByteSize())
            if held.refusal:
                context.abort(grpc.StatusCode.UNAVAILABLE, held.refusal)
            return service_pb2.ModelInferResponse(model_name="toy")

    with ThreadPoolExecutor(THREADS) as threads:
        server = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(StandIn(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        held.may_answer.set()
        server.stop(None)
