"""A bucket on this machine: an S3 server in this process, or in one of its own (`python -m testing.bucket PORT`).

Alone it prints the variables by which others reach its empty bucket.
"""

from __future__ import annotations

import os
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any
from unittest import mock

RIGHTS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
HOST = "127.0.0.1"
POLL_SECONDS = 0.02  # until a server sees that it is to stop


def one_at_a_time(application: Callable[..., Any]) -> Callable[..., list[bytes]]:
    """Returns an application that checks a condition and writes at once, as S3 does. By itself, moto does not."""
    answering = threading.Lock()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        if size := environ.get("CONTENT_LENGTH"):
            environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(size)))  # before others wait for it
        with answering:
            return list(application(environ, start))

    return answer


class S3:
    """Objects stay while it is stopped. Imports moto, which takes seconds, only when it is made."""

    _denied = ""

    def __init__(self, port: int = 0) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._application = one_at_a_time(DomainDispatcherApplication(create_backend_app))
        self.host, self.port = HOST, port
        self.go_on()

    @property
    def environment(self) -> dict[str, str]:
        return {**RIGHTS, "AWS_ENDPOINT": f"http://{self.host}:{self.port}"}

    def ask(self, method: str, path: str) -> None:
        request = urllib.request.Request(f"http://{self.host}:{self.port}/{path}", method=method)
        urllib.request.urlopen(request, timeout=30).close()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        if environ["REQUEST_METHOD"] == self._denied:
            start("403 Forbidden", [])
            return []
        return self._application(environ, start)

    def stop(self) -> None:
        self._server.shutdown()
        self._serving.join()  # it closes the socket: only then another server can have the port

    @contextmanager
    def denying(self, method: str) -> Iterator[None]:
        """Answers this method with 403 during the block."""
        self._denied = method
        try:
            yield
        finally:
            self._denied = ""

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Is away during the block."""
        self.stop()
        try:
            yield
        finally:
            self.go_on()

    def go_on(self) -> None:
        from moto.moto_server.werkzeug_app import MotoRequestHandler
        from werkzeug.serving import make_server

        self._server = make_server(self.host, self.port, self._answer, threaded=True, request_handler=MotoRequestHandler)
        self.port = self._server.port
        self._serving = threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,), daemon=True)
        self._serving.start()


@contextmanager
def bucket() -> Iterator[S3]:
    """An empty bucket of the name `bucket`, which this process reaches by its environment."""
    server = S3()
    try:
        server.ask("POST", "moto-api/reset")  # all servers of a process have the same buckets
        server.ask("PUT", "bucket")
        with mock.patch.dict(os.environ, server.environment):
            yield server
    finally:
        server.stop()


if __name__ == "__main__":
    server = S3(int(sys.argv[1]))
    server.ask("PUT", "bucket")
    print(
        *(f"{name}={value}" for name, value in server.environment.items()),
        "# ready: the bucket is s3://bucket",
        sep="\n",
        flush=True,
    )
    threading.Event().wait()
