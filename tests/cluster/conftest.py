"""A router before three fakes, one in each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.fake_server import FakeServer
from tests.cluster.router import Router, fake_servers, routing


@pytest.fixture(scope="module")
def _routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Router, list[FakeServer]]]:
    with fake_servers(3) as replicas, routing(tmp_path_factory.mktemp("router"), replicas) as router:
        yield router, replicas


@pytest.fixture
def replicas(_routed: tuple[Router, list[FakeServer]]) -> list[FakeServer]:
    return _routed[1]


@pytest.fixture
def router(_routed: tuple[Router, list[FakeServer]]) -> Iterator[Router]:
    """A router whose replicas are all well."""
    router, replicas = _routed
    yield router
    for one in replicas:
        one.drains, one.refusal, one.status = False, "", 503
        one.dead.clear()
        one.release()
    router.until_up()
