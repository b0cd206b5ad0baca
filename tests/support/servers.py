"""Servers for tests that do not test how a server ends, and gateways before them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hplm.server import TritonServer, process_group
from hplm.server.held import holders
from hplm.server.inherited import environment
from hplm.server.stubs import stubs


@contextmanager
def serving(*repository: object, **options: object) -> Iterator[TritonServer]:
    """Kills the server when the test has passed, because Triton takes three seconds to end."""
    with TritonServer(*repository, **options) as server:
        yield server
        process_group.kill(server.pid)


@contextmanager
def server_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Gives this process the environment of a server's model process, without the server. Yields the server's id."""
    name = f"hplm-test-{uuid.uuid4().hex[:12]}"
    for variable, value in environment(name, 0).items():
        monkeypatch.setenv(variable, value)
    yield name
    for path in process_group.SHARED_MEMORY.glob(f"{name}*"):
        path.unlink()


@contextmanager
def gateway_before(grpc_url: str) -> Iterator[str]:
    """Starts the gateway with OpenAI's interface as an operator starts it alone. Yields its HOST:PORT."""
    command = [sys.executable, "-m", "hplm_openai", "--url", grpc_url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://(\S+)/v1", process.stdout.readline())
            assert found, "the gateway has not said its address"
            yield found[1]
        finally:
            process.terminate()


def until_ready(process: subprocess.Popen[str]) -> str:
    """Returns what `hplm serve` prints until it is ready."""
    assert process.stdout is not None
    said = [""]
    while not said[-1].startswith("Ready"):
        said.append(process.stdout.readline())
        assert said[-1], said
    return "".join(said)


def held(server: TritonServer) -> int:
    """Returns how many requests the server's models hold."""
    return sum(holder.held for holder in holders(server.id))


def kill_model(server: TritonServer, model: str) -> None:
    """Kills the process of a model, which has one instance."""
    (stub,) = [stub for stub in stubs(server.pid) if stub.model == model]
    os.kill(stub.pid, signal.SIGKILL)


def published(server: TritonServer, metric: str, **labels: str) -> float:
    """Returns the sum of a metric's series that have these labels, as the server publishes them once a second."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    series = [line for line in lines if line.startswith(f"{metric}{{") and all(label in line for label in wanted)]
    return sum(float(line.rpartition(" ")[2]) for line in series)


def cancelled(server: TritonServer) -> float:
    """Returns how many requests for generated text were cancelled."""
    return published(server, "hplm_generations_total", outcome="cancelled")
