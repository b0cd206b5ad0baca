"""Model processes show how many requests they hold."""

import os

import pytest

from hplm.server.held import Held, HeldBy, holders
from tests.support.servers import server_environment
from tests.support.wait import eventually


@pytest.fixture
def server(monkeypatch):
    with server_environment(monkeypatch) as name:
        yield name


def test_a_process_shows_what_it_holds_and_may_have_lost_until_it_closes(server):
    shown = Held("toy-upper")
    (holder,) = holders(server)
    shown.take()
    shown.forget()  # a probe, which may be lost
    assert not holder.may_have_lost
    shown.take(2)
    shown.answered()
    assert (holder.pid, holder.model, holder.held, holder.may_have_lost) == (os.getpid(), "toy-upper", 1, True)
    shown.answered()
    assert holder.held == 0 and holder.may_have_lost  # the answer may still be on its way
    with holder.path.open("r+b") as file:  # as if it was answered long ago
        file.write(bytes(16))
    assert not holder.may_have_lost
    shown.close()
    assert not holders(server)
    holder.path.touch()  # by a process that has not written yet
    assert [one.held for one in holders(server)] == [0]


def test_another_model_sees_how_many_requests_are_held_and_new_processes_too(server):
    upper = HeldBy("toy-upper")
    assert upper.count == 0
    first, other = Held("toy-upper"), Held("toy-lookup")
    for shown in (first, first, other):
        shown.take()
    eventually(lambda: upper.count == 2)  # it looks for processes once a second
