"""The real nginx before a live state, with the configuration of deploy/nginx, on a free port."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hplm.follow.source_server import source_config
from tests.support.wait import PATIENCE, eventually

TOKEN = "a-token.of+followers="
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return free.getsockname()[1]


@contextmanager
def nginx(state: Path, folder: Path, port: int = 0, token: str = TOKEN, host: str = HOST) -> Iterator[str]:
    """Yields the address of the source."""
    binary = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if binary is None:
        pytest.skip("no nginx on PATH (Debian, Ubuntu: apt-get install nginx-light)")
    folder.mkdir(exist_ok=True)
    port = port or free_port()
    config = folder / "nginx.conf"
    config.write_text(source_config(state, host, port, token, folder))
    command = [binary, "-c", str(config), "-p", str(folder), "-g", "daemon off;"]
    with (folder / "log").open("ab") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            eventually(lambda: process.poll() is not None or is_open(port, host))
            assert process.poll() is None, (folder / "log").read_text()
            yield f"http://{host}:{port}"
        finally:
            process.terminate()
            process.wait(PATIENCE)


def is_open(port: int, host: str = HOST) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
