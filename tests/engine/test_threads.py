"""Threads that divide their work among the cores."""

import logging
import threading

import pytest
import torch

from hplm.engine.engine import Engine
from hplm.engine.staging import Stager
from hplm.engine.threads import repeat
from testing.toy import TENANTS, WORDS
from tests.engine.asker import Asker


@pytest.fixture
def same_threads():
    """Gives later tests the threads that they would have had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("same_threads")
def test_the_thread_that_computes_does_on_a_cpu(toy, monkeypatch):
    seen = {}

    def noted(owner, name):
        call = getattr(owner, name)

        def noting(*args):
            seen[name] = torch.get_num_threads()
            return call(*args)

        monkeypatch.setattr(owner, name, noting)

    noted(Stager, "stage")
    noted(Engine, "run")
    asker = Asker(toy.folder, threads="3")
    asker.wait(asker.ask(TENANTS[0].id, [WORDS[0]]))
    asker.close()
    assert seen == {"stage": 3, "run": 3}


def test_a_thread_that_cannot_be_prepared_works_all_the_same(caplog):
    worked = threading.Event()

    def fails():
        raise ValueError("no")

    def step():
        worked.set()
        return False

    with caplog.at_level(logging.ERROR):
        repeat(step, "unlucky", fails).join()
    assert worked.is_set() and "unlucky" in caplog.text
