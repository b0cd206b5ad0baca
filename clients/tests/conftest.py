"""A fake Triton, and the shared server with an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from triton_fakes import FakeTriton

from loadtest.proxy import make_certificate
from tests.support.ways import Way


@pytest.fixture
def fake() -> Iterator[FakeTriton]:
    with FakeTriton() as running:
        yield running


@pytest.fixture
def ask(way: Way, fake: FakeTriton) -> Callable[..., Any]:
    """A function that runs `ask(lambda client: ..., **settings)` with a client of the fake."""
    return lambda use, **settings: way.call(way.url(fake), use, **{"backbone": "minilm", **settings})


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients wait only a moment longer than a deadline."""
    monkeypatch.setattr("hplm_client.retry.GRACE_S", 0.1)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of a certificate for localhost and 127.0.0.1, and of the same with its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))
