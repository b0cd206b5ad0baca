"""Shared servers: what a test leaves behind is named, and the next test gets a server that answers."""

import pytest

from hplm.server.held import Held
from tests.support.servers import CONFIGS, Servers, server_environment

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]


def test_requests_that_nobody_waits_for_are_named(server, monkeypatch):
    monkeypatch.setattr("tests.support.servers.PATIENCE", 0.1)
    with server_environment(monkeypatch, server.server.id):
        held = Held("toy-upper")
        held.take()
        assert "holds 1 requests" in server.ill()
        held.close()


def test_a_server_that_is_ill_is_named_and_replaced_and_one_that_does_not_start_is_not_tried_twice(monkeypatch):
    tried = []

    class Lease:
        def __init__(self, name):
            tried.append(name)
            self.name, self.said, self.built = name, "", CONFIGS[name]

        is_stopped = False

        def ill(self):
            return self.said

        def close(self):
            tried.append("closed")

    monkeypatch.setattr("tests.support.servers.Lease", Lease)
    monkeypatch.setitem(CONFIGS, "one", CONFIGS["toy"])
    ours = Servers()
    first = ours.get("one")
    ours.check("one", "test_x")
    assert ours.get("one") is first
    first.said = "has ended with exit code 9"
    with pytest.raises(pytest.fail.Exception, match=r"\Aafter test_x the server 'one' has ended"):
        ours.check("one", "test_x")
    assert ours.get("one") is not first and tried == ["one", "closed", "one"]
    for _ in range(2):
        with pytest.raises(pytest.fail.Exception, match=r"\Athe server 'nothing' does not start: KeyError"):
            ours.get("nothing")
    assert tried.count("nothing") == 1
