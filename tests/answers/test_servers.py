"""Shared servers: what a test leaves behind is named, and the next test gets a server that answers."""

import pytest
from tritonclient.utils import InferenceServerException

from hplm.server import process_group
from hplm.server.held import Held
from tests.support.servers import CONFIGS, Servers, server_environment

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]


def test_a_tenant_is_a_tests_own_with_its_keys_and_limits(server):
    tenant = server.tenant(keyed=True, in_flight=7)
    with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
        server.stock().ask(["a"], tenant.id)
    assert server.stock().ask(["a"], tenant.id, headers=tenant.headers)["VERSION"].tolist() == [[b"1"]]
    (own,) = (one for one in server.manager().current().tenants if one.id == tenant.id)
    assert own.in_flight == 7
    assert server.ill() == "" and own.id not in [one.id for one in server.manager().current().tenants]


def test_a_server_that_a_test_has_killed_is_named_and_replaced(server, servers):
    process_group.kill(server.server.pid)
    with pytest.raises(pytest.fail.Exception, match=r"\Aafter test_x the server 'toy' has ended with exit code"):
        servers.check("toy", "test_x")
    assert servers.get("toy") is not server


def test_requests_that_nobody_waits_for_are_named(server, monkeypatch):
    monkeypatch.setattr("tests.support.servers.PATIENCE", 0.1)
    with server_environment(monkeypatch, server.server.id):
        held = Held("toy-upper")
        held.take()
        assert "holds 1 requests" in server.ill()
        held.close()


def test_a_server_that_does_not_start_is_named_in_the_first_line_and_not_tried_twice(tmp_path, monkeypatch):
    tried = []

    def empty(folder):
        tried.append(folder)
        return CONFIGS["nothing"](folder)

    monkeypatch.setitem(CONFIGS, "empty", empty)
    ours = Servers()
    for _ in range(2):
        with pytest.raises(pytest.fail.Exception, match=r"\Athe server 'empty' does not start: KeyError"):
            ours.get("empty")
    assert len(tried) == 1
