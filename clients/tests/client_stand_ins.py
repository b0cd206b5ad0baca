"""Misbehaving servers. They are plain sockets on threads, and count the requests that reach them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from hplm_client.retry import Attempts

HTTP2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # what a gRPC client waits for before it sends its request


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class StandIn:
    """Gives each connection to `handle` on a thread of its own."""

    def __init__(self, port: int = 0) -> None:
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def handle(self, client: socket.socket) -> None:
        raise NotImplementedError

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            self.handle(client)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Cutter(StandIn):
    """Reads and counts each request, and drops the connection instead of answering."""

    def __init__(self, protocol: str) -> None:
        self.requests = 0
        self._greeting = HTTP2_SETTINGS if protocol == "grpc" else b""
        super().__init__()

    def handle(self, client: socket.socket) -> None:
        client.sendall(self._greeting)
        received = b""
        while b"TEXT" not in received:
            received += client.recv(65536)
        self.requests += 1
        client.shutdown(socket.SHUT_RDWR)


class Canned(StandIn):
    """Answers the first request of each connection with the given bytes, and then closes the connection."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.closed = threading.Event()
        super().__init__()

    def handle(self, client: socket.socket) -> None:
        client.recv(65536)
        client.sendall(self._answer)
        client.shutdown(socket.SHUT_WR)
        self.closed.set()
        while client.recv(65536):  # if a request stays unread, closing resets the connection before the answer arrives
            pass


class Silent(StandIn):
    """Reads and never answers."""

    def handle(self, client: socket.socket) -> None:
        while client.recv(65536):
            pass


class Dripping(StandIn):
    """Sends an answer byte by byte for some seconds, and then hangs up."""

    def __init__(self, beginning: bytes) -> None:
        self._beginning = beginning
        super().__init__()

    def handle(self, client: socket.socket) -> None:
        client.recv(65536)
        client.sendall(self._beginning)
        for _ in range(100):
            time.sleep(0.05)
            client.sendall(b"x")


class Forwarder(StandIn):
    """Forwards a port of its own to a real server."""

    def __init__(self, port: int, target: str) -> None:
        host, _, target_port = target.partition(":")
        self._target = (host, int(target_port))
        super().__init__(port)

    def handle(self, client: socket.socket) -> None:
        with socket.create_connection(self._target) as server:
            threading.Thread(target=_pump, args=(server, client), daemon=True).start()
            _pump(client, server)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def before_each_pause(monkeypatch, act: Callable[[], None]) -> None:
    """Runs `act` each time a client decides whether to retry."""
    decide = Attempts.pause_s

    def acting(self, error):
        act()
        return decide(self, error)

    monkeypatch.setattr(Attempts, "pause_s", acting)


@contextlib.contextmanager
def grpc_server(answer: Callable[[Any, grpc.ServicerContext], Any]) -> Iterator[str]:
    """Answers every inference over gRPC, a stream with what `answer` iterates over. Gives its address."""

    class Answering(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ModelInfer(self, request, context):
            return answer(request, context)

        def ModelStreamInfer(self, request_iterator, context):
            return answer(request_iterator, context)

    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Answering(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None)
