"""A source in Python, whose answers a test can change, hold up and cut off."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from tests.follow.nginx import HOST

Fault = Callable[["Answer"], None]


class Answer:
    """The answer to a request. A fault may change it."""

    def __init__(self, path: str, status: int, body: bytes) -> None:
        self.path = path
        self.status = status
        self.body = body
        self.length = len(body)  # as it is said; a shorter body is cut off
        self.pieces = lambda: iter([self.body])  # as they are sent


class FaultySource:
    def __init__(self, state: Path) -> None:
        self.state = state
        self.fault: Fault = lambda answer: None
        self.asked: list[str] = []  # methods, paths and ranges
        self.url = ""

    def answer(self, path: str, span: str | None) -> Answer:
        file = self.state / path
        if not file.is_file():
            return Answer(path, 404, b"")
        content = file.read_bytes()
        if span is None:
            return Answer(path, 200, content)
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", span).groups()
        part = content[int(first) : int(last) + 1 if last else None]
        return Answer(path, 206, part) if part else Answer(path, 416, b"")


@contextmanager
def faulty(state: Path) -> Iterator[FaultySource]:
    source = FaultySource(state)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            span = self.headers["Range"]
            source.asked.append(f"GET {self.path}" + (f" {span}" if span else ""))
            answer = source.answer(unquote(self.path).lstrip("/"), span)
            source.fault(answer)
            self.send_response(answer.status)
            self.send_header("Content-Length", str(answer.length))
            self.end_headers()
            sent = 0
            for piece in answer.pieces():
                self.wfile.write(piece)
                sent += len(piece)
            self.close_connection = sent < answer.length

        def do_PUT(self) -> None:
            source.asked.append(f"PUT {self.path}")
            answer = Answer(self.path.lstrip("/"), 204, self.rfile.read(int(self.headers["Content-Length"])))
            source.fault(answer)
            if answer.status == 204:
                file = source.state / answer.path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(answer.body)
            self.send_response(answer.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    source.url = f"http://{HOST}:{server.server_port}"
    yield source
    server.shutdown()
    server.server_close()
