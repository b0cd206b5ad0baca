"""A real Triton with a fake backbone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_repository
import pytest
from client_ways import WAYS, Way

from hplm.server import TritonServer
from tests.support.servers import _server_is_well, servers  # noqa: F401


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    protocol, _, kind = request.param.partition("-")
    return Way(protocol, kind == "asyncio")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository: Path = tmp_path_factory.mktemp("repository")
    fake_repository.write(repository, "minilm", answering="minilm-lookup")
    with TritonServer(repository) as running:
        yield running


@pytest.fixture
def ask(way: Way, server: TritonServer) -> Callable[..., Any]:
    """A function that runs `ask(lambda client: ..., **settings)` with a client of the running server."""
    url = server.http_url if way.protocol == "http" else server.grpc_url

    def asked(use: Callable[[Any], Any], **settings: Any) -> Any:
        return way.call(url, use, **{"backbone": "minilm", **settings})

    return asked
