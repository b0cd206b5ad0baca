"""The gateway's process as `hplm serve` starts it, without a server."""

import socket

import pytest

from hplm.errors import HplmError
from hplm.server import Gateway, process
from hplm.server import gateway as module
from tests.support.message import mentioning, mentions
from tests.support.wait import eventually


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(module, "NEEDED", ("sys", "no_such_package"))
    with pytest.raises(HplmError, match=mentioning("--openai-port", "no_such_package", "pip install")):
        Gateway("127.0.0.1", 0, print)


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HplmError, match=mentioning("--openai-port", port)):
            Gateway("127.0.0.1", port, print)


@pytest.mark.slow
def test_a_gateway_that_cannot_run_is_started_after_longer_and_longer_pauses(tmp_path, monkeypatch):
    """And by a thread of its own, because `hplm serve` may be busy for minutes with a server that does not start."""
    monkeypatch.setattr(process, "SOON_SECONDS", 60.0)  # however slowly it ends
    said = []
    with Gateway("127.0.0.1", 0, said.append) as gateway:
        gateway.start("no url", tmp_path / "log")
        eventually(lambda: len(said) >= 2, 240)
    assert gateway.pid is None
    assert mentions(said[0], "restarting", "OpenAI", "code 1", "1 s") and mentions(said[1], "2 s")
    assert "no url" in (tmp_path / "log").read_text()
