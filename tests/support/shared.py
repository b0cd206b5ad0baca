"""A small exported backbone for all tests, made once, and what holds for all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from hplm.tenants import state_folder
from testing.reference import Reference
from testing.toy import Toy, make_toy


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Lets torch draw the same numbers in a test whichever others run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def readers_are_seen() -> Iterator[None]:
    """All that read a state here may write beside it, so a change waits for nobody whom it cannot see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_folder, "UNSEEN_SECONDS", 0.0)
        yield


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def reference(toy: Toy) -> Reference:
    return Reference.open(toy.folder)


@pytest.fixture
def nothing_is_logged():
    """pytest keeps logged errors. Their tracebacks hold requests, which nothing may hold at the end."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
