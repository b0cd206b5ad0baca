"""Shared servers: what a test leaves behind is named, so that it fails the test and not the next one."""

import pytest

from hplm.server.held import Held
from tests.support.servers import server_environment

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]


def test_requests_that_nobody_waits_for_are_named(server, monkeypatch):
    monkeypatch.setattr("tests.support.servers.PATIENCE", 0.1)
    with server_environment(monkeypatch, server.server.id):
        held = Held("toy-upper")
        held.take()
        assert "holds 1 requests" in server.ill()
        held.close()
