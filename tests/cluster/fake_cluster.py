"""`hplm cluster` before fakes of Triton: `python -m tests.cluster.fake_cluster cluster up ...`. Each fake is its `serve`.

A file in the cluster's folder tells the fakes what to do: `held` keeps all requests, `draining` keeps fakes that are told to
end, with `broken` none starts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hplm.cli.main import main
from hplm.cluster import local
from hplm.server import process_group
from hplm.tenants.state import READER
from loadtest.server import ServedCluster
from tests.cluster.fake_server import FakeServer
from tests.cluster.front import Front
from tests.support.wait import eventually

PROGRAM = (sys.executable, "-m", "tests.cluster.fake_cluster")
HELD, DRAINING, BROKEN = "held", "draining", "broken"


class FakeCluster(ServedCluster):
    PROGRAM = PROGRAM

    @property
    def router(self) -> Front:
        return Front(int(self.address.rpartition(":")[2]))

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        (self.folder / what).touch()
        try:
            yield
        finally:
            (self.folder / what).unlink()

    def pid(self, replica: str) -> int | None:
        log = str(self.folder.resolve() / "logs" / f"{replica}-triton.log")
        return next((pid for pid in self.processes() if log in process_group.arguments(pid)), None)

    def printed(self, replica: str) -> str:
        return (self.folder / "logs" / f"{replica}.log").read_text()


class _Fake(FakeServer):
    """Stands in a folder whose files tell it what to do."""

    def __init__(self, folder: Path, name: str, ports: tuple[int, int]) -> None:
        super().__init__(name, ports=ports)
        self._folder = folder

    def take(self, headers: dict[str, str], size: int) -> None:
        super().take(headers, size)
        eventually(lambda: not (self._folder / HELD).exists())


def _serve(words: list[str]) -> None:
    parser, ended = argparse.ArgumentParser(), threading.Event()
    parser.add_argument("--log-file", type=Path)
    parser.add_argument("--http-port", type=int)
    parser.add_argument("--grpc-port", type=int)
    given, _ = parser.parse_known_args(words)
    folder = given.log_file.parents[1]
    if (folder / BROKEN).exists():
        sys.exit(BROKEN)
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    _Fake(folder, os.environ[READER], (given.http_port, given.grpc_port))
    print("Ready", flush=True)
    ended.wait()
    print("it drains", flush=True)
    eventually(lambda: not (folder / DRAINING).exists())
    print("drained", flush=True)


if __name__ == "__main__":
    local.HPLM = PROGRAM
    if sys.argv[1] == "serve":
        _serve(sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
