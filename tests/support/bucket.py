"""A bucket on this machine: an S3 server in this process."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from moto.server import ThreadedMotoServer

RIGHTS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}


class S3:
    """Objects stay while it is stopped."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.host, self.port = self._server.get_host_and_port()

    @property
    def environment(self) -> dict[str, str]:
        return {**RIGHTS, "AWS_ENDPOINT": f"http://{self.host}:{self.port}"}

    def ask(self, method: str, path: str) -> None:
        request = urllib.request.Request(f"http://{self.host}:{self.port}/{path}", method=method)
        urllib.request.urlopen(request, timeout=30).close()

    def stop(self) -> None:
        self._server.stop()

    def go_on(self) -> None:
        self._server = ThreadedMotoServer(ip_address=self.host, port=self.port, verbose=False)
        self._server.start()


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
